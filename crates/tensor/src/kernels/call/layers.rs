//! Normalization, embedding and cross-entropy.

use super::{Operands, Replace, each, kernel_calls, written};
use crate::kernels::cpu::cross_entropy::VocabularyChunk;
use crate::kernels::cpu::embedding::Bags;
use crate::kernels::cpu::norm::NormKind;
use crate::kernels::{Operand, OperandMut};
use crate::precision::Precision;
use trireme_base::{Cost, DType, Positions};

kernel_calls! {
    /// Normalization, embedding and cross-entropy. Gradients of inputs and weights are written, or added if the call accumulates. Gradients
    /// of embedding tables are always added.
    LayerCall {
        "norm" => Norm { x: Operand, weight: Operand, bias: Option<Operand>, y: OperandMut, statistics: OperandMut; kind: NormKind }
        "norm_backward_input" => NormBackwardInput {
            x: Operand, weight: Operand, statistics: Operand, dy: Operand, dx: OperandMut; kind: NormKind, accumulate: bool
        }
        "norm_backward_weight" => NormBackwardWeight {
            x: Operand, dy: Operand, statistics: Operand, d_weight: OperandMut; accumulate: bool
        }
        "round" => Round { x: Operand, y: OperandMut; precision: Precision }
        "embedding" => Embedding {
            ids: Operand, table: Operand, positions: Option<Operand>, out: OperandMut; precision: Precision, at: Positions
        }
        "embedding_bag" => EmbeddingBag { bags: Bags<Operand>, table: Operand, out: OperandMut; precision: Precision }
        "embedding_bag_backward" => EmbeddingBagBackward { bags: Bags<Operand>, dy: Operand, d_table: OperandMut }
        "position_backward" => PositionBackward { dy: Operand, d_positions: OperandMut; at: Positions }
        "softmax_statistics" => SoftmaxStatistics {
            logits: Operand, targets: Operand, statistics: OperandMut; chunk: VocabularyChunk
        }
        "merge_statistics" => MergeStatistics { parts: Operand, statistics: OperandMut }
        "cross_entropy_gradient" => CrossEntropyGradient {
            logits: Operand, targets: Operand, statistics: Operand, weights: Option<Operand>, gradient: OperandMut;
            chunk: VocabularyChunk, scale: f32
        }
    }
}

/// Operations of a normalization per element: two sums, a difference, a product with the weight, and a bias.
const NORM_OPERATIONS: usize = 8;

/// Operations of the input gradient of a normalization per element: the normalized value, two sums, and their combination.
const NORM_INPUT_GRADIENT_OPERATIONS: usize = 14;

/// Operations of the weight gradient of a normalization per element: the normalized value, a product and a sum.
const NORM_WEIGHT_GRADIENT_OPERATIONS: usize = 4;

impl LayerCall {
    pub(crate) fn cost(&self) -> Cost {
        match self {
            Self::Norm { x, y, statistics, .. } => each(x.shape(), NORM_OPERATIONS)
                .reads(x.num_bytes())
                .writes(y.num_bytes())
                .writes(statistics.num_bytes()),
            Self::NormBackwardInput { x, dy, dx, accumulate, .. } => {
                let cost = each(x.shape(), NORM_INPUT_GRADIENT_OPERATIONS);
                written(cost.reads(x.num_bytes()).reads(dy.num_bytes()), dx, *accumulate)
            }
            Self::NormBackwardWeight { x, dy, d_weight, accumulate, .. } => {
                let cost = each(x.shape(), NORM_WEIGHT_GRADIENT_OPERATIONS);
                written(cost.reads(x.num_bytes()).reads(dy.num_bytes()), d_weight, *accumulate)
            }
            Self::Round { x, y, .. } => Cost::ZERO.reads(x.num_bytes()).writes(y.num_bytes()),
            Self::Embedding { ids, table, positions, out, .. } => {
                let num_elements = out.shape().num_elements();
                let cost = Cost::others(&[usize::from(positions.is_some()), num_elements]);
                let read = num_elements * table.dtype().size();
                cost.reads(ids.num_bytes()).reads(read).writes(out.num_bytes())
            }
            Self::EmbeddingBag { bags, table, out, .. } => {
                let num_read = bags.ids.shape().num_elements().saturating_mul(out.shape().cols());
                let read = num_read.saturating_mul(table.dtype().size());
                Cost::others(&[num_read]).reads(bags.ids.num_bytes()).reads(read).writes(out.num_bytes())
            }
            Self::EmbeddingBagBackward { bags, dy, .. } => {
                let num_added = bags.ids.shape().num_elements().saturating_mul(dy.shape().cols());
                let cost = Cost::others(&[num_added]).reads(dy.num_bytes()).reads(bags.ids.num_bytes());
                cost.updates(num_added.saturating_mul(DType::F32.size()))
            }
            Self::PositionBackward { dy, at, .. } => {
                let num_updated = at.len().saturating_mul(dy.shape().cols());
                let cost = each(dy.shape(), 1).reads(dy.num_bytes());
                cost.updates(num_updated.saturating_mul(DType::F32.size()))
            }
            Self::SoftmaxStatistics { logits, statistics, .. } => {
                let cost = each(logits.shape(), Cost::EXP + 3);
                cost.reads(logits.num_bytes()).updates(statistics.num_bytes())
            }
            Self::MergeStatistics { parts, statistics } => {
                each(parts.shape(), Cost::EXP).reads(parts.num_bytes()).writes(statistics.num_bytes())
            }
            Self::CrossEntropyGradient { logits, statistics, gradient, .. } => {
                let cost = each(logits.shape(), Cost::EXP + 2);
                let cost = cost.reads(logits.num_bytes()).reads(statistics.num_bytes());
                cost.writes(gradient.num_bytes())
            }
        }
    }
}

impl Operands for Bags<Operand> {
    fn with_operands(&self, replace: &mut Replace<'_>) -> Self {
        self.map(|operand| operand.with_operands(replace))
    }
}
