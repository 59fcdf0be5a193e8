use crate::element::reduce_into;
use std::ops::Range;
use trireme_base::{DType, ReduceOp};
use trireme_schedule::collective::{Memory, Side, Span};

/// The memories that the steps of an operation read and write.
pub(crate) struct Memories<'a> {
    /// The full vector, or the part of it that this rank stores.
    vector: &'a mut [u8],
    /// Offset of that part in the full vector, in bytes.
    pub(super) first: usize,
    pub(super) input: &'a [u8],
    pub(super) scratch: &'a mut [u8],
    dtype: DType,
    op: Option<ReduceOp>,
}

/// A byte range of one of the memories.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MemoryRange {
    memory: Memory,
    pub(super) bytes: Range<usize>,
}

impl MemoryRange {
    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// The bytes `from..to` of this range.
    pub(super) fn part(&self, from: usize, to: usize) -> MemoryRange {
        MemoryRange { memory: self.memory, bytes: self.bytes.start + from..self.bytes.start + to }
    }

    pub(super) fn overlaps(&self, other: &MemoryRange) -> bool {
        self.memory == other.memory
            && self.bytes.start < other.bytes.end
            && other.bytes.start < self.bytes.end
    }
}

impl<'a> Memories<'a> {
    /// The memories of an in-place operation on `vector`.
    pub(crate) fn new(vector: &'a mut [u8], dtype: DType, op: Option<ReduceOp>) -> Self {
        Memories { vector, first: 0, input: &[], scratch: &mut [], dtype, op }
    }

    pub(crate) fn range(&self, span: &Span) -> MemoryRange {
        let element_bytes = self.dtype.size();
        let first = if span.memory == Memory::Vector { self.first } else { 0 };
        let bytes = if span.range.is_empty() {
            0..0
        } else {
            span.range.start * element_bytes - first..span.range.end * element_bytes - first
        };
        MemoryRange { memory: span.memory, bytes }
    }

    pub(super) fn bytes(&self, range: &MemoryRange) -> &[u8] {
        let memory = match range.memory {
            Memory::Vector => &*self.vector,
            Memory::Input => self.input,
            Memory::Scratch => &*self.scratch,
        };
        &memory[range.bytes.clone()]
    }

    /// The bytes of a range, mutably.
    ///
    /// # Panics
    /// If the range is in the input, to which no step may write.
    pub(super) fn bytes_mut(&mut self, range: &MemoryRange) -> &mut [u8] {
        let memory = match range.memory {
            Memory::Vector => &mut *self.vector,
            Memory::Input => unreachable!("no step writes to the input"),
            Memory::Scratch => &mut *self.scratch,
        };
        &mut memory[range.bytes.clone()]
    }

    /// Reduces received bytes into a range. `own` is the side of the operand that is stored there.
    pub(super) fn reduce(&mut self, range: &MemoryRange, received: &[u8], own: Side) {
        let (dtype, op) = (self.dtype, self.op.expect("only reductions have reducing steps"));
        reduce_into(self.bytes_mut(range), received, dtype, op, own);
    }

    pub(super) fn copy(&mut self, from: &Span, to: &Span) {
        let (from, to) = (self.range(from), self.range(to));
        match (from.memory, to.memory) {
            (Memory::Vector, Memory::Vector) => self.vector.copy_within(from.bytes, to.bytes.start),
            (Memory::Scratch, Memory::Scratch) => self.scratch.copy_within(from.bytes, to.bytes.start),
            (Memory::Vector, Memory::Scratch) => {
                self.scratch[to.bytes].copy_from_slice(&self.vector[from.bytes]);
            }
            (Memory::Scratch, Memory::Vector) => {
                self.vector[to.bytes].copy_from_slice(&self.scratch[from.bytes]);
            }
            (Memory::Input, _) => {
                let input = self.input;
                self.bytes_mut(&to).copy_from_slice(&input[from.bytes]);
            }
            (_, Memory::Input) => unreachable!("no step writes to the input"),
        }
    }
}
