//! Copy, permutation and gather kernels, sums over a dim, and softmax.

use super::Device;
use crate::kernels::StridedBlocks;
use crate::kernels::call::BlockCall;
use crate::tensor::{View, ViewMut};

impl Device {
    /// Copies `num_blocks` blocks of `len` elements from `x` to `y`.
    ///
    /// Panics if a block exceeds its tensor or the dtypes differ.
    pub(crate) fn copy_blocks(
        &self,
        x: View<'_>,
        from: StridedBlocks,
        y: ViewMut<'_>,
        to: StridedBlocks,
        num_blocks: usize,
        len: usize,
    ) {
        assert_eq!(x.dtype(), y.dtype());
        let (x, y) = (x.operand(), y.into_operand());
        self.issue(BlockCall::CopyBlocks { x, y, from, to, num_blocks, len });
    }

    /// Copies `x` to `y` with permuted dims. `strides` are the strides in `x` of the `dims` of `y`.
    pub(crate) fn permute(&self, x: View<'_>, strides: [usize; 4], y: ViewMut<'_>, dims: [usize; 4]) {
        assert_eq!(x.dtype(), y.dtype());
        self.issue(BlockCall::Permute { x: x.operand(), y: y.into_operand(), strides, dims });
    }

    /// Computes `y[o, i] = factor * sum over d of x[o, d, i]` for `x` of shape `[outer, dim, inner]`.
    pub(crate) fn sum_dim(&self, x: View<'_>, dims: [usize; 3], factor: f32, y: ViewMut<'_>) {
        self.issue(BlockCall::SumDim { x: x.operand(), y: y.into_operand(), dims, factor });
    }

    /// Computes `y[o, d, i] = factor * x[o, i]` for `y` of shape `[outer, dim, inner]`.
    pub(crate) fn broadcast_dim(&self, x: View<'_>, dims: [usize; 3], factor: f32, y: ViewMut<'_>) {
        self.issue(BlockCall::BroadcastDim { x: x.operand(), y: y.into_operand(), dims, factor });
    }

    /// Computes `y[i] = x[ids[i]]` for rows.
    ///
    /// Panics if an id is not the index of a row of `x`.
    pub(crate) fn gather_rows(&self, x: View<'_>, ids: View<'_>, y: ViewMut<'_>) {
        assert_eq!(x.dtype(), y.dtype());
        self.issue(BlockCall::GatherRows { x: x.operand(), ids: ids.operand(), y: y.into_operand() });
    }

    /// Computes the softmax of each row of `[rows, cols]`. A row whose elements are all negative infinity gives NaN.
    pub(crate) fn softmax(&self, x: View<'_>, y: ViewMut<'_>) {
        self.issue(BlockCall::Softmax { x: x.operand(), y: y.into_operand() });
    }

    /// Replaces `dy`, the gradient of the softmax `y`, by the gradient of the softmax's input, in place.
    pub(crate) fn softmax_backward(&self, y: View<'_>, dy: ViewMut<'_>) {
        self.issue(BlockCall::SoftmaxBackward { y: y.operand(), dy: dy.into_operand() });
    }
}
