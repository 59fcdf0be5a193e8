//! The arrays that kernels read and write: addresses, which a CPU kernel turns into slices while it runs.
//!
//! A view is borrowed only while a kernel is issued, but the kernel may run later. It then holds an operand instead of a borrow. This is
//! sound because the memory outlives the kernel: an arena stays mapped until the last kernel issued to its device has run, and the memory
//! of a freed block is reused only by kernels that run later.

use super::cpu::Cpu;
use super::cpu::element::{Element, Floats, FloatsMut};
use crate::shape::Shape;
use bytemuck::Pod;
use std::ops::Range;
use std::ptr::NonNull;
use trireme_base::DType;

/// A row-major array that a kernel reads: a [`View`](crate::View) without its borrow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Operand {
    start: NonNull<u8>,
    num_bytes: usize,
    dtype: DType,
    shape: Shape,
    /// Whether the host cannot access the array.
    is_detached: bool,
}

/// A row-major array that a kernel writes: a [`ViewMut`](crate::ViewMut) without its borrow.
#[derive(Debug)]
pub(crate) struct OperandMut(Operand);

// SAFETY: an address alone gives no access. Reading the memory requires a `Cpu`; see `bytes`.
unsafe impl Send for Operand {}
// SAFETY: as above.
unsafe impl Sync for Operand {}

impl Operand {
    /// Creates an operand of `num_bytes` bytes from `start` on. `num_bytes` must match `shape` and `dtype`.
    pub(crate) fn new(
        start: NonNull<u8>,
        num_bytes: usize,
        (shape, dtype): (Shape, DType),
        is_detached: bool,
    ) -> Self {
        Operand { start, num_bytes, dtype, shape, is_detached }
    }

    pub(crate) fn of_host(bytes: &[u8], of: (Shape, DType)) -> Self {
        Operand::new(NonNull::from(bytes).cast(), bytes.len(), of, false)
    }

    pub(crate) fn shape(&self) -> Shape {
        self.shape
    }

    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    pub(crate) fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    pub(crate) fn addresses(&self) -> Range<usize> {
        let start = self.start.addr().get();
        start..start + self.num_bytes
    }

    /// Returns whether the operands share a byte.
    pub(crate) fn overlaps(&self, other: &Operand) -> bool {
        let (own, other) = (self.addresses(), other.addresses());
        own.start.max(other.start) < own.end.min(other.end)
    }

    /// Returns the bytes `range` as an array of another shape and dtype. Panics if the range exceeds the operand.
    pub(crate) fn part(&self, range: Range<usize>, of: (Shape, DType)) -> Self {
        assert!(range.start <= range.end && range.end <= self.num_bytes, "{range:?} of {}", self.num_bytes);
        // SAFETY: within the memory by the line above.
        let start = unsafe { self.start.add(range.start) };
        Operand::new(start, range.len(), of, self.is_detached)
    }

    /// Returns the address at which `cpu` can access the operand. Panics if `cpu` cannot access it.
    fn address_for(&self, cpu: &Cpu) -> NonNull<u8> {
        match cpu.mapping() {
            Some(mapping) if self.num_bytes > 0 => mapping.translate(self.start, self.num_bytes),
            Some(_) => self.start,
            None => {
                assert!(!self.is_detached, "a kernel of the host was given memory of a device");
                self.start
            }
        }
    }

    pub(crate) fn bytes(self, cpu: &Cpu) -> &[u8] {
        let start = self.address_for(cpu);
        // SAFETY: `start` is where `cpu` can access all bytes of a view that was borrowed when the kernel was issued, in memory that still
        // exists (see the module). Every byte is initialized: pages of a fresh mapping are zeros. Nothing writes to these bytes now: a
        // kernel of the CPU runs before the call that issues it returns, and the view is borrowed meanwhile. A detached device runs one
        // kernel at a time, and concurrent copies are ordered by events with all jobs that use the same memory. The kernel itself writes
        // only to separately borrowed memory.
        unsafe { std::slice::from_raw_parts(start.as_ptr(), self.num_bytes) }
    }

    /// Returns all elements. Panics if their dtype is not `T`.
    pub(crate) fn elements<T: Element>(self, cpu: &Cpu) -> &[T] {
        assert_eq!(self.dtype, T::DTYPE);
        bytemuck::cast_slice(self.bytes(cpu))
    }

    pub(crate) fn f32s(self, cpu: &Cpu) -> &[f32] {
        self.elements(cpu)
    }

    /// Returns all elements. Panics if their dtype is not u32.
    pub(crate) fn u32s(self, cpu: &Cpu) -> &[u32] {
        assert_eq!(self.dtype, DType::U32);
        self.words(cpu)
    }

    /// Returns all elements. Panics if their dtype is not f64.
    pub(crate) fn f64s(self, cpu: &Cpu) -> &[f64] {
        assert_eq!(self.dtype, DType::F64);
        self.words(cpu)
    }

    /// Returns the elements as plain words of equal size, for copies. Panics if the sizes differ.
    pub(crate) fn words<W: Pod>(self, cpu: &Cpu) -> &[W] {
        assert_eq!(self.dtype.size(), size_of::<W>());
        bytemuck::cast_slice(self.bytes(cpu))
    }

    /// Returns all elements. Panics if their dtype is not a float that kernels compute with.
    pub(crate) fn floats(self, cpu: &Cpu) -> Floats<'_> {
        match self.dtype {
            DType::Bf16 => Floats::Bf16(self.elements(cpu)),
            DType::F16 => Floats::F16(self.elements(cpu)),
            _ => Floats::F32(self.elements(cpu)),
        }
    }
}

impl OperandMut {
    /// Creates an operand from an array that no other operand overlaps.
    pub(crate) fn new(operand: Operand) -> Self {
        OperandMut(operand)
    }

    pub(crate) fn of_host(bytes: &mut [u8], of: (Shape, DType)) -> Self {
        let num_bytes = bytes.len();
        OperandMut(Operand::new(NonNull::from(bytes).cast(), num_bytes, of, false))
    }

    /// Returns the array for reading.
    pub(crate) fn as_operand(&self) -> Operand {
        self.0
    }

    pub(crate) fn shape(&self) -> Shape {
        self.0.shape
    }

    /// Reborrows the array.
    pub(crate) fn reborrow(&mut self) -> OperandMut {
        OperandMut(self.0)
    }

    pub(crate) fn dtype(&self) -> DType {
        self.0.dtype
    }

    pub(crate) fn num_bytes(&self) -> usize {
        self.0.num_bytes
    }

    /// Like [`Operand::part`].
    pub(crate) fn into_part(self, range: Range<usize>, of: (Shape, DType)) -> Self {
        OperandMut(self.0.part(range, of))
    }

    pub(crate) fn bytes<'c>(&'c mut self, cpu: &'c Cpu) -> &'c mut [u8] {
        let start = self.0.address_for(cpu);
        // SAFETY: as in `Operand::bytes`, for a view that was borrowed mutably: no other code reads or writes these bytes now.
        unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), self.0.num_bytes) }
    }

    /// Returns all elements. Panics if their dtype is not `T`.
    pub(crate) fn elements<'c, T: Element>(&'c mut self, cpu: &'c Cpu) -> &'c mut [T] {
        assert_eq!(self.0.dtype, T::DTYPE);
        bytemuck::cast_slice_mut(self.bytes(cpu))
    }

    pub(crate) fn f32s<'c>(&'c mut self, cpu: &'c Cpu) -> &'c mut [f32] {
        self.elements(cpu)
    }

    /// Returns all elements. Panics if their dtype is not u32.
    pub(crate) fn u32s<'c>(&'c mut self, cpu: &'c Cpu) -> &'c mut [u32] {
        assert_eq!(self.0.dtype, DType::U32);
        self.words(cpu)
    }

    /// Returns all elements. Panics if their dtype is not f64.
    pub(crate) fn f64s<'c>(&'c mut self, cpu: &'c Cpu) -> &'c mut [f64] {
        assert_eq!(self.0.dtype, DType::F64);
        self.words(cpu)
    }

    /// Like [`Operand::words`].
    pub(crate) fn words<'c, W: Pod>(&'c mut self, cpu: &'c Cpu) -> &'c mut [W] {
        assert_eq!(self.0.dtype.size(), size_of::<W>());
        bytemuck::cast_slice_mut(self.bytes(cpu))
    }

    /// Returns all elements. Panics if their dtype is not a float that kernels compute with.
    pub(crate) fn floats<'c>(&'c mut self, cpu: &'c Cpu) -> FloatsMut<'c> {
        match self.0.dtype {
            DType::Bf16 => FloatsMut::Bf16(self.elements(cpu)),
            DType::F16 => FloatsMut::F16(self.elements(cpu)),
            _ => FloatsMut::F32(self.elements(cpu)),
        }
    }
}
