//! Copies, permutations, gathers, sums over a dim, and softmax.

use super::{kernel_calls, per_element_cost, plain_arguments};
use crate::kernels::StridedBlocks;
use crate::view::{View, ViewMut};
use trireme_base::Cost;

kernel_calls! {
    /// Copies, permutations, gathers, sums over a dim, and softmax.
    BlockCall {
        /// Copies `num_blocks` blocks of `len` elements from `x` to `y`.
        ///
        /// Panics if a block exceeds its tensor or the dtypes differ.
        pub(crate) fn copy_blocks => CopyBlocks {
            x: View, from: StridedBlocks, y: ViewMut, to: StridedBlocks, num_blocks: usize, len: usize;
            assert_eq!(x.dtype(), y.dtype());
        }

        /// Copies `x` to `y` with permuted dims. `strides` are the strides in `x` of the `dims` of `y`.
        ///
        /// Panics if the dtypes differ.
        pub(crate) fn permute => Permute {
            x: View, strides: [usize; 4], y: ViewMut, dims: [usize; 4]; assert_eq!(x.dtype(), y.dtype());
        }

        /// Computes `y[o, i] = factor * sum over d of x[o, d, i]`, where `dims` is the shape `[outer, dim, inner]` of `x`.
        pub(crate) fn sum_dim => SumDim { x: View, dims: [usize; 3], factor: f32, y: ViewMut }

        /// Computes `y[o, d, i] = factor * x[o, i]`, where `dims` is the shape `[outer, dim, inner]` of `y`.
        pub(crate) fn broadcast_dim => BroadcastDim { x: View, dims: [usize; 3], factor: f32, y: ViewMut }

        /// Computes `y[i] = x[ids[i]]` for rows.
        ///
        /// Panics if an id is not the index of a row of `x` or the dtypes differ.
        pub(crate) fn gather_rows => GatherRows { x: View, ids: View, y: ViewMut; assert_eq!(x.dtype(), y.dtype()); }

        /// Computes the softmax of each row of `[rows, cols]`. A row whose elements are all negative infinity gives NaN.
        pub(crate) fn softmax => Softmax { x: View, y: ViewMut }

        /// Replaces `dy`, the gradient of the softmax `y`, by the gradient of the softmax's input, in place.
        pub(crate) fn softmax_backward => SoftmaxBackward { y: View, dy: ViewMut }
    }
}

plain_arguments! { StridedBlocks }

/// Operations of a softmax per element: two exponentials, the maximum, the sum and the scale.
const SOFTMAX_OPERATIONS: usize = 2 * Cost::EXP + 4;

impl BlockCall {
    pub(crate) fn cost(&self) -> Cost {
        match self {
            Self::CopyBlocks { x, num_blocks, len, .. } => {
                let num_bytes = num_blocks * len * x.dtype().size();
                Cost::ZERO.reads(num_bytes).writes(num_bytes)
            }
            Self::Permute { x, y, .. } => Cost::ZERO.reads(x.num_bytes()).writes(y.num_bytes()),
            Self::SumDim { x, y, .. } => {
                per_element_cost(x.shape(), 1).reads(x.num_bytes()).writes(y.num_bytes())
            }
            Self::BroadcastDim { x, y, .. } => {
                per_element_cost(y.shape(), 1).reads(x.num_bytes()).writes(y.num_bytes())
            }
            Self::GatherRows { ids, y, .. } => {
                Cost::ZERO.reads(ids.num_bytes() + y.num_bytes()).writes(y.num_bytes())
            }
            Self::Softmax { x, y } => {
                per_element_cost(x.shape(), SOFTMAX_OPERATIONS).reads(x.num_bytes()).writes(y.num_bytes())
            }
            Self::SoftmaxBackward { y, dy } => {
                per_element_cost(y.shape(), 4).reads(y.num_bytes()).updates(dy.num_bytes())
            }
        }
    }
}
