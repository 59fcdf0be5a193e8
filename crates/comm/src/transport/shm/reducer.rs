use super::view::View;
use crate::CommError;
use crate::buffer::CacheLine;
use crate::element::{combine_into, finish_mean, reduce_into};
use std::ops::Range;
use trireme_base::{DType, ReduceOp};
use trireme_schedule::collective::{Side, StackInstruction, canonical_order, num_partials};

/// Reduces several members' vectors piece by piece, in the canonical order.
pub(super) struct Reducer {
    num_members: usize,
    instructions: Vec<StackInstruction>,
    /// The stack on which the instructions operate. Each entry is a partial result of one piece.
    partials: Vec<CacheLine>,
    piece_bytes: usize,
}

impl Reducer {
    pub(super) fn new(num_members: usize, piece_bytes: usize) -> Result<Self, CommError> {
        let piece_bytes = piece_bytes.next_multiple_of(size_of::<CacheLine>());
        Ok(Reducer {
            num_members,
            instructions: canonical_order(num_members),
            partials: CacheLine::zeroed(num_partials(num_members) * piece_bytes)?,
            piece_bytes,
        })
    }

    /// Reduces the bytes `range` of all `inputs`, and passes each result with its range to `put`.
    ///
    /// # Safety
    /// All views must contain the bytes, and no code but `put` may write to them until this function returns. `put` may write to them: a
    /// piece has been read when its result is passed to `put`, and the result is not part of any view.
    pub(super) unsafe fn reduce(
        &mut self,
        inputs: &[View],
        range: Range<usize>,
        dtype: DType,
        op: ReduceOp,
        mut put: impl FnMut(Range<usize>, &[u8]),
    ) {
        let end = range.end;
        for start in range.step_by(self.piece_bytes) {
            let piece = start..end.min(start + self.piece_bytes);
            let source = |member: usize| {
                // SAFETY: the bytes are mapped. By the caller's promise, no other code writes to this piece while the slice exists: others
                // at most read it, and `put` is called after `evaluate` has returned and its slices have ended.
                unsafe { std::slice::from_raw_parts(inputs[member].bytes(&piece).cast_const(), piece.len()) }
            };
            let result = evaluate(
                &self.instructions,
                bytemuck::cast_slice_mut(&mut self.partials),
                self.piece_bytes,
                piece.len(),
                dtype,
                op,
                source,
            );
            finish_mean(result, dtype, op, self.num_members);
            put(piece, result);
        }
    }
}

/// Executes the instructions on a stack of partial results. Returns the result, which is at the bottom.
fn evaluate<'a, 'b>(
    terms: &[StackInstruction],
    partials: &'a mut [u8],
    stride: usize,
    num_bytes: usize,
    dtype: DType,
    op: ReduceOp,
    source: impl Fn(usize) -> &'b [u8],
) -> &'a mut [u8] {
    let mut depth = 0;
    let mut rest = terms;
    while let Some((term, after)) = rest.split_first() {
        rest = after;
        let (below, above) = partials.split_at_mut(depth * stride);
        match (*term, after.first()) {
            // Fused, which avoids storing the first operand.
            (StackInstruction::Load(left), Some(StackInstruction::Reduce(right))) => {
                combine_into(&mut above[..num_bytes], source(left.0), source(right.0), dtype, op);
                depth += 1;
                rest = &after[1..];
            }
            (StackInstruction::Load(rank), _) => {
                above[..num_bytes].copy_from_slice(source(rank.0));
                depth += 1;
            }
            (StackInstruction::Reduce(rank), _) => {
                let top = &mut below[(depth - 1) * stride..][..num_bytes];
                reduce_into(top, source(rank.0), dtype, op, Side::Left);
            }
            (StackInstruction::Combine, _) => {
                let (left, right) = below.split_at_mut((depth - 1) * stride);
                let left = &mut left[(depth - 2) * stride..][..num_bytes];
                reduce_into(left, &right[..num_bytes], dtype, op, Side::Left);
                depth -= 1;
            }
        }
    }
    &mut partials[..num_bytes]
}
