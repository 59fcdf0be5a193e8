//! Copies, permutations, gathers, sums over a dim, and softmax.

use super::{each, kernel_calls};
use crate::kernels::{Operand, OperandMut, StridedBlocks};
use trireme_base::Cost;

kernel_calls! {
    /// Copies, permutations, gathers, sums over a dim, and softmax.
    BlockCall {
        "copy_blocks" => CopyBlocks { x: Operand, y: OperandMut; from: StridedBlocks, to: StridedBlocks, num_blocks: usize, len: usize }
        /// Permutes the dims of `x`: `strides` are the strides in `x` of the `dims` of `y`.
        "permute" => Permute { x: Operand, y: OperandMut; strides: [usize; 4], dims: [usize; 4] }
        /// `y[o, i] = factor * sum over d of x[o, d, i]`, where `dims` is the shape `[outer, dim, inner]` of `x`.
        "sum_dim" => SumDim { x: Operand, y: OperandMut; dims: [usize; 3], factor: f32 }
        /// `y[o, d, i] = factor * x[o, i]`, where `dims` is the shape `[outer, dim, inner]` of `y`.
        "broadcast_dim" => BroadcastDim { x: Operand, y: OperandMut; dims: [usize; 3], factor: f32 }
        "gather_rows" => GatherRows { x: Operand, ids: Operand, y: OperandMut }
        "softmax" => Softmax { x: Operand, y: OperandMut }
        "softmax_backward" => SoftmaxBackward { y: Operand, dy: OperandMut }
    }
}

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
            Self::SumDim { x, y, .. } => each(x.shape(), 1).reads(x.num_bytes()).writes(y.num_bytes()),
            Self::BroadcastDim { x, y, .. } => each(y.shape(), 1).reads(x.num_bytes()).writes(y.num_bytes()),
            Self::GatherRows { ids, y, .. } => {
                Cost::ZERO.reads(ids.num_bytes() + y.num_bytes()).writes(y.num_bytes())
            }
            Self::Softmax { x, y } => {
                each(x.shape(), SOFTMAX_OPERATIONS).reads(x.num_bytes()).writes(y.num_bytes())
            }
            Self::SoftmaxBackward { y, dy } => {
                each(y.shape(), 4).reads(y.num_bytes()).updates(dy.num_bytes())
            }
        }
    }
}
