//! Normalization, embedding and cross-entropy kernels.

use super::Device;
use crate::kernels::Bags;
use crate::kernels::call::LayerCall;
use crate::kernels::cpu::cross_entropy::{RowFactors, VocabularyChunk};
use crate::kernels::cpu::norm::NormKind;
use crate::precision::Precision;
use crate::tensor::{View, ViewMut};
use trireme_base::Positions;

/// The inputs of [`Device::norm`] and the statistics that it wrote.
pub(crate) struct NormedRows<'a> {
    pub(crate) x: View<'a>,
    pub(crate) weight: View<'a>,
    pub(crate) statistics: View<'a>,
}

impl Device {
    /// Normalizes each row of `x`, `[rows, cols]`. Weight and bias are `[cols]`, `statistics` is `[rows, 2]`.
    pub(crate) fn norm(
        &self,
        x: View<'_>,
        weight: View<'_>,
        bias: Option<View<'_>>,
        kind: NormKind,
        y: ViewMut<'_>,
        statistics: ViewMut<'_>,
    ) {
        let (x, weight, bias) = (x.operand(), weight.operand(), bias.map(View::operand));
        let (y, statistics) = (y.into_operand(), statistics.into_operand());
        self.issue(LayerCall::Norm { x, weight, bias, y, statistics, kind });
    }

    /// Writes or adds the gradient of [`Device::norm`] with respect to `x`.
    pub(crate) fn norm_backward_input(
        &self,
        rows: NormedRows<'_>,
        kind: NormKind,
        dy: View<'_>,
        dx: ViewMut<'_>,
        accumulate: bool,
    ) {
        let NormedRows { x, weight, statistics } = rows;
        let [x, weight, statistics, dy] = [x, weight, statistics, dy].map(View::operand);
        let dx = dx.into_operand();
        self.issue(LayerCall::NormBackwardInput { x, weight, statistics, dy, dx, kind, accumulate });
    }

    /// Writes or adds the gradient of [`Device::norm`] with respect to the weight, `[cols]`.
    pub(crate) fn norm_backward_weight(
        &self,
        x: View<'_>,
        dy: View<'_>,
        statistics: View<'_>,
        d_weight: ViewMut<'_>,
        accumulate: bool,
    ) {
        let [x, dy, statistics] = [x, dy, statistics].map(View::operand);
        let d_weight = d_weight.into_operand();
        self.issue(LayerCall::NormBackwardWeight { x, dy, statistics, d_weight, accumulate });
    }

    /// Computes `y = x` in f32, rounded to `precision`.
    ///
    /// Panics if the shapes differ.
    pub(crate) fn round(&self, precision: Precision, x: View<'_>, y: ViewMut<'_>) {
        assert_eq!(x.shape(), y.shape());
        self.issue(LayerCall::Round { x: x.operand(), y: y.into_operand(), precision });
    }

    /// Computes `out[i] = table[ids[i]] + positions[at(i % at.len())]` for the rows of sequences of length `at.len()`. Values of `table`
    /// and `positions` are rounded to `precision`.
    pub(crate) fn embedding(
        &self,
        precision: Precision,
        ids: View<'_>,
        table: View<'_>,
        positions: Option<View<'_>>,
        at: Positions,
        out: ViewMut<'_>,
    ) {
        let (ids, table, positions) = (ids.operand(), table.operand(), positions.map(View::operand));
        self.issue(LayerCall::Embedding { ids, table, positions, out: out.into_operand(), precision, at });
    }

    /// Sums rows of a table, rounded to `precision`, over each bag of ids. `table` is `[rows, cols]`, `out` is `[bags, cols]`.
    pub(crate) fn embedding_bag(
        &self,
        precision: Precision,
        bags: Bags<View<'_>>,
        table: View<'_>,
        out: ViewMut<'_>,
    ) {
        let (bags, table, out) = (bags.map(View::operand), table.operand(), out.into_operand());
        self.issue(LayerCall::EmbeddingBag { bags, table, out, precision });
    }

    /// Adds the rows of `dy`, `[bags, cols]`, to the gradient of the table of [`Device::embedding_bag`].
    pub(crate) fn embedding_bag_backward(&self, bags: Bags<View<'_>>, dy: View<'_>, d_table: ViewMut<'_>) {
        let (bags, dy, d_table) = (bags.map(View::operand), dy.operand(), d_table.into_operand());
        self.issue(LayerCall::EmbeddingBagBackward { bags, dy, d_table });
    }

    /// Computes `d_positions[at(t)] += sum over sequences of dy[sequence, t]`.
    pub(crate) fn position_backward(&self, dy: View<'_>, at: Positions, d_positions: ViewMut<'_>) {
        let (dy, d_positions) = (dy.operand(), d_positions.into_operand());
        self.issue(LayerCall::PositionBackward { dy, d_positions, at });
    }

    /// Accumulates a chunk of logits, `[rows, chunk]`, into the rows' softmax `statistics`, `[rows, 3]`.
    pub(crate) fn softmax_statistics(
        &self,
        logits: View<'_>,
        targets: View<'_>,
        chunk: VocabularyChunk,
        statistics: ViewMut<'_>,
    ) {
        let (logits, targets, statistics) = (logits.operand(), targets.operand(), statistics.into_operand());
        self.issue(LayerCall::SoftmaxStatistics { logits, targets, statistics, chunk });
    }

    /// Merges the statistics of vocabulary shards, `[ranks, rows, 3]`, into the statistics of the full rows, `[rows, 3]`.
    pub(crate) fn merge_statistics(&self, parts: View<'_>, statistics: ViewMut<'_>) {
        let (parts, statistics) = (parts.operand(), statistics.into_operand());
        self.issue(LayerCall::MergeStatistics { parts, statistics });
    }

    /// Computes the gradient of the rows' losses with respect to a chunk of logits, `[rows, chunk]`. `statistics`, `[rows, 3]`, must cover
    /// all chunks.
    pub(crate) fn cross_entropy_gradient(
        &self,
        logits: View<'_>,
        targets: View<'_>,
        chunk: VocabularyChunk,
        statistics: View<'_>,
        factors: RowFactors<View<'_>>,
        gradient: ViewMut<'_>,
    ) {
        let RowFactors { scale, weights } = factors;
        let [logits, targets, statistics] = [logits, targets, statistics].map(View::operand);
        let (weights, gradient) = (weights.map(View::operand), gradient.into_operand());
        self.issue(LayerCall::CrossEntropyGradient {
            logits,
            targets,
            statistics,
            weights,
            gradient,
            chunk,
            scale,
        });
    }
}
