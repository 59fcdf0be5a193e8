//! Normalization, embedding and cross-entropy.

use super::{array_structs, kernel_calls, per_element_cost, plain_arguments, with_output_traffic};
use crate::kernels::cpu::cross_entropy::{RowFactors, VocabularyChunk};
use crate::kernels::cpu::embedding::Bags;
use crate::kernels::cpu::norm::{NormKind, NormedRows};
use crate::precision::Precision;
use crate::view::{View, ViewMut};
use trireme_base::{Cost, DType, Positions};

kernel_calls! {
    /// Normalization, embedding and cross-entropy. Gradients of embedding tables are always accumulated.
    LayerCall {
        /// Normalizes each row of `x`, `[rows, cols]`. Weight and bias are `[cols]`, `statistics` is `[rows, 2]`.
        pub(crate) fn norm => Norm {
            x: View, weight: View, bias: Option<View>, kind: NormKind, y: ViewMut, statistics: ViewMut
        }

        /// Writes or adds the gradient of [`norm`](crate::Device::norm) with respect to `x`.
        pub(crate) fn norm_backward_input => NormBackwardInput {
            rows: NormedRows<View>, kind: NormKind, dy: View, dx: ViewMut, accumulate: bool
        }

        /// Writes or adds the gradient of [`norm`](crate::Device::norm) with respect to the weight, `[cols]`.
        pub(crate) fn norm_backward_weight => NormBackwardWeight {
            x: View, dy: View, statistics: View, d_weight: ViewMut, accumulate: bool
        }

        /// Computes `y = x` in f32, rounded to `precision`.
        ///
        /// Panics if the shapes differ.
        pub(crate) fn round => Round { precision: Precision, x: View, y: ViewMut; assert_eq!(x.shape(), y.shape()); }

        /// Computes `out[i] = table[ids[i]] + position_table[row_positions.at(i % row_positions.len())]` for the rows of sequences of
        /// length `row_positions.len()`. Values of `table` and `position_table` are rounded to `precision`.
        pub(crate) fn embedding => Embedding {
            precision: Precision, ids: View, table: View, position_table: Option<View>, row_positions: Positions, out: ViewMut
        }

        /// Computes `out[i] = x[i] + table[row_positions.at((first_row + i) % row_positions.len())]` for rows, in f32.
        ///
        /// `x` and `out` are `[rows, cols]`, `table` is `[positions, cols]`. `first_row` is the index of the first row of `x` among the
        /// rows of all ranks. Panics if a position is not the index of a row of the table.
        pub(crate) fn add_positions => AddPositions {
            x: View, table: View, first_row: usize, row_positions: Positions, out: ViewMut; assert_eq!(x.shape(), out.shape());
        }

        /// Sums rows of a table, rounded to `precision`, over each bag of ids. `table` is `[rows, cols]`, `out` is `[bags, cols]`.
        pub(crate) fn embedding_bag => EmbeddingBag {
            precision: Precision, bags: Bags<View>, table: View, out: ViewMut
        }

        /// Adds the rows of `dy`, `[bags, cols]`, to the gradient of the table of [`embedding_bag`](crate::Device::embedding_bag).
        pub(crate) fn embedding_bag_backward => EmbeddingBagBackward { bags: Bags<View>, dy: View, d_table: ViewMut }

        /// Computes `d_positions[row_positions.at(t)] += sum over sequences of dy[sequence, t]`.
        pub(crate) fn position_backward => PositionBackward { dy: View, row_positions: Positions, d_positions: ViewMut }

        /// Accumulates a chunk of logits, `[rows, chunk]`, into the rows' softmax `statistics`, `[rows, 3]`.
        pub(crate) fn softmax_statistics => SoftmaxStatistics {
            logits: View, targets: View, chunk: VocabularyChunk, statistics: ViewMut
        }

        /// Merges the statistics of vocabulary shards, `[ranks, rows, 3]`, into the statistics of the full rows, `[rows, 3]`.
        pub(crate) fn merge_statistics => MergeStatistics { parts: View, statistics: ViewMut }

        /// Computes the gradient of the rows' losses with respect to a chunk of logits, `[rows, chunk]`. `statistics`, `[rows, 3]`, must
        /// cover all chunks.
        pub(crate) fn cross_entropy_gradient => CrossEntropyGradient {
            logits: View, targets: View, chunk: VocabularyChunk, statistics: View, factors: RowFactors<View>, gradient: ViewMut
        }
    }
}

plain_arguments! { NormKind, Positions, Precision, VocabularyChunk }

array_structs!(Bags, NormedRows, RowFactors);

/// Operations of a normalization per element: two sums, a difference, a product with the weight, and a bias.
const NORM_OPERATIONS: usize = 8;

/// Operations of the input gradient of a normalization per element: the normalized value, two sums, and their combination.
const NORM_INPUT_GRADIENT_OPERATIONS: usize = 14;

/// Operations of the weight gradient of a normalization per element: the normalized value, a product and a sum.
const NORM_WEIGHT_GRADIENT_OPERATIONS: usize = 4;

impl LayerCall {
    pub(crate) fn cost(&self) -> Cost {
        match self {
            Self::Norm { x, y, statistics, .. } => per_element_cost(x.shape(), NORM_OPERATIONS)
                .reads(x.num_bytes())
                .writes(y.num_bytes())
                .writes(statistics.num_bytes()),
            Self::NormBackwardInput { rows, dy, dx, accumulate, .. } => {
                let cost = per_element_cost(rows.x.shape(), NORM_INPUT_GRADIENT_OPERATIONS);
                with_output_traffic(cost.reads(rows.x.num_bytes()).reads(dy.num_bytes()), dx, *accumulate)
            }
            Self::NormBackwardWeight { x, dy, d_weight, accumulate, .. } => {
                let cost = per_element_cost(x.shape(), NORM_WEIGHT_GRADIENT_OPERATIONS);
                with_output_traffic(cost.reads(x.num_bytes()).reads(dy.num_bytes()), d_weight, *accumulate)
            }
            Self::Round { x, y, .. } => Cost::ZERO.reads(x.num_bytes()).writes(y.num_bytes()),
            Self::Embedding { ids, table, position_table, out, .. } => {
                let num_elements = out.shape().num_elements();
                let cost = Cost::others(&[usize::from(position_table.is_some()), num_elements]);
                let read = num_elements * table.dtype().size();
                cost.reads(ids.num_bytes()).reads(read).writes(out.num_bytes())
            }
            Self::AddPositions { x, out, .. } => {
                per_element_cost(x.shape(), 1).reads(2 * x.num_bytes()).writes(out.num_bytes())
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
            Self::PositionBackward { dy, row_positions, .. } => {
                let num_updated = row_positions.len().saturating_mul(dy.shape().cols());
                let cost = per_element_cost(dy.shape(), 1).reads(dy.num_bytes());
                cost.updates(num_updated.saturating_mul(DType::F32.size()))
            }
            Self::SoftmaxStatistics { logits, statistics, .. } => {
                let cost = per_element_cost(logits.shape(), Cost::EXP + 3);
                cost.reads(logits.num_bytes()).updates(statistics.num_bytes())
            }
            Self::MergeStatistics { parts, statistics } => per_element_cost(parts.shape(), Cost::EXP)
                .reads(parts.num_bytes())
                .writes(statistics.num_bytes()),
            Self::CrossEntropyGradient { logits, statistics, gradient, .. } => {
                let cost = per_element_cost(logits.shape(), Cost::EXP + 2);
                let cost = cost.reads(logits.num_bytes()).reads(statistics.num_bytes());
                cost.writes(gradient.num_bytes())
            }
        }
    }
}
