//! Normalisations, embeddings and cross-entropies on a device.

use super::Device;
use crate::kernels::Bags;
use crate::kernels::call::LayerCall;
use crate::kernels::cpu::cross_entropy::VocabularyChunk;
use crate::kernels::cpu::norm::NormKind;
use crate::precision::Precision;
use crate::tensor::{View, ViewMut};
use trireme_base::Positions;

impl Device {
    /// Normalises each row of `x`, `[rows, cols]`; weight and bias are `[cols]`, `statistics` `[rows, 2]`.
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

    /// Gradient of [`Device::norm`] with respect to `x`, written or added.
    pub(crate) fn norm_backward_input(
        &self,
        (x, weight, statistics): (View<'_>, View<'_>, View<'_>),
        kind: NormKind,
        dy: View<'_>,
        dx: ViewMut<'_>,
        accumulate: bool,
    ) {
        let [x, weight, statistics, dy] = [x, weight, statistics, dy].map(View::operand);
        let dx = dx.into_operand();
        self.issue(LayerCall::NormBackwardInput { x, weight, statistics, dy, dx, kind, accumulate });
    }

    /// Gradient of [`Device::norm`] with respect to the weight, `[cols]`, written or added.
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

    /// `y = x` rounded to `precision`, in f32.
    ///
    /// Panics if the shapes differ.
    pub(crate) fn round(&self, precision: Precision, x: View<'_>, y: ViewMut<'_>) {
        assert_eq!(x.shape(), y.shape());
        self.issue(LayerCall::Round { x: x.operand(), y: y.into_operand(), precision });
    }

    /// `out[i] = table[ids[i]] + positions[at(i % at.len())]`, of rows in sequences of `at.len()`, of values rounded to `precision`.
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

    /// Sums of rows of a table, `[rows, cols]`, rounded to `precision`, by bags of ids: `[bags, cols]`.
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

    /// `d_positions[at(t)] += sum over sequences of dy[sequence, t]`.
    pub(crate) fn position_backward(&self, dy: View<'_>, at: Positions, d_positions: ViewMut<'_>) {
        let (dy, d_positions) = (dy.operand(), d_positions.into_operand());
        self.issue(LayerCall::PositionBackward { dy, d_positions, at });
    }

    /// Takes a chunk of logits, `[rows, chunk]`, into the `statistics` of their rows, `[rows, 3]`.
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

    /// Statistics of the rows, `[rows, 3]`, from those that ranks have of their parts of the vocabulary, `[ranks, rows, 3]`.
    pub(crate) fn merge_statistics(&self, parts: View<'_>, statistics: ViewMut<'_>) {
        let (parts, statistics) = (parts.operand(), statistics.into_operand());
        self.issue(LayerCall::MergeStatistics { parts, statistics });
    }

    /// Gradient of the rows' losses with respect to a chunk of logits, `[rows, chunk]`, for the statistics of all chunks, `[rows, 3]`.
    pub(crate) fn cross_entropy_gradient(
        &self,
        logits: View<'_>,
        targets: View<'_>,
        chunk: VocabularyChunk,
        statistics: View<'_>,
        (scale, weights): (f32, Option<View<'_>>),
        gradient: ViewMut<'_>,
    ) {
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
