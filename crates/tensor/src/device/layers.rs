//! Normalisations, embeddings and cross-entropies on a device.

use super::{Device, each, written};
use crate::kernels::cpu::cross_entropy::VocabularyChunk;
use crate::kernels::cpu::element::with_element;
use crate::kernels::cpu::embedding::Bags;
use crate::kernels::cpu::norm::{NormKind, Normalised};
use crate::precision::Precision;
use crate::tensor::{View, ViewMut};
use trireme_base::{Cost, DType};

impl Device {
    /// Normalises each row of `x`; `statistics` is `rows x 2`.
    pub(crate) fn norm(
        &self,
        x: View<'_>,
        weight: View<'_>,
        bias: Option<View<'_>>,
        kind: NormKind,
        mut y: ViewMut<'_>,
        mut statistics: ViewMut<'_>,
    ) {
        let bias = bias.map(|bias| bias.f32s());
        let cost = each(x.shape(), NORM_OPERATIONS).reads(x.num_bytes());
        self.count("norm", cost.writes(y.num_bytes()).writes(statistics.num_bytes()));
        with_element!(y.dtype() => |T| {
            self.cpu.norm::<T>(x.f32s(), weight.f32s(), bias, kind, y.elements(), statistics.f32s());
        });
    }

    /// Gradient of [`Device::norm`] with respect to `x`, written or added.
    pub(crate) fn norm_backward_input(
        &self,
        (x, weight, statistics): (View<'_>, View<'_>, View<'_>),
        kind: NormKind,
        dy: View<'_>,
        mut dx: ViewMut<'_>,
        accumulate: bool,
    ) {
        let cost = each(x.shape(), NORM_INPUT_GRADIENT_OPERATIONS).reads(x.num_bytes()).reads(dy.num_bytes());
        self.count("norm_backward_input", written(cost, &dx, accumulate));
        let rows = Normalised { x: x.f32s(), weight: weight.f32s(), statistics: statistics.f32s(), kind };
        with_element!(dy.dtype() => |T| {
            self.cpu.norm_backward_input::<T>(rows, dy.elements(), dx.f32s(), accumulate);
        });
    }

    /// Gradient of [`Device::norm`] with respect to the weight, written or added.
    pub(crate) fn norm_backward_weight(
        &self,
        x: View<'_>,
        dy: View<'_>,
        statistics: View<'_>,
        mut d_weight: ViewMut<'_>,
        accumulate: bool,
    ) {
        let cost =
            each(x.shape(), NORM_WEIGHT_GRADIENT_OPERATIONS).reads(x.num_bytes()).reads(dy.num_bytes());
        self.count("norm_backward_weight", written(cost, &d_weight, accumulate));
        let (x, statistics, d_weight) = (x.f32s(), statistics.f32s(), d_weight.f32s());
        with_element!(dy.dtype() => |T| {
            self.cpu.norm_backward_weight::<T>(x, dy.elements(), statistics, d_weight, accumulate);
        });
    }

    /// `y = x` rounded to `precision`, in f32.
    ///
    /// # Panics
    /// If the shapes differ.
    pub(crate) fn round(&self, precision: Precision, x: View<'_>, mut y: ViewMut<'_>) {
        assert_eq!(x.shape(), y.shape());
        self.count("round", Cost::ZERO.reads(x.num_bytes()).writes(y.num_bytes()));
        with_element!(x.dtype() => |T| with_element!(precision.dtype() => |P| {
            self.cpu.round::<T, P>(x.elements(), y.f32s());
        }));
    }

    /// `out[i] = table[ids[i]] + positions[first_position + i % seq_len]`, of values rounded to `precision`.
    pub(crate) fn embedding(
        &self,
        precision: Precision,
        ids: View<'_>,
        table: View<'_>,
        positions: Option<View<'_>>,
        (seq_len, first_position): (usize, usize),
        mut out: ViewMut<'_>,
    ) {
        let num_elements = out.shape().num_elements();
        let cost = Cost::others(&[usize::from(positions.is_some()), num_elements]).reads(ids.num_bytes());
        self.count("embedding", cost.reads(num_elements * table.dtype().size()).writes(out.num_bytes()));
        with_element!(table.dtype() => |T| with_element!(precision.dtype() => |P| {
            let positions = positions.map(|positions| positions.elements());
            let (ids, table, at) = (ids.u32s(), table.elements(), (seq_len, first_position));
            self.cpu.embedding::<T, P>(ids, table, positions, at, out.f32s());
        }));
    }

    /// Sums of rows of a table, rounded to `precision`, by bags of ids.
    pub(crate) fn embedding_bag(
        &self,
        precision: Precision,
        bags: Bags<'_>,
        table: View<'_>,
        mut out: ViewMut<'_>,
    ) {
        let cols = out.shape().cols();
        let num_read = bags.ids.len().saturating_mul(cols);
        let cost = Cost::others(&[num_read]).reads(size_of_val(bags.ids));
        self.count(
            "embedding_bag",
            cost.reads(num_read.saturating_mul(table.dtype().size())).writes(out.num_bytes()),
        );
        with_element!(table.dtype() => |T| with_element!(precision.dtype() => |P| {
            self.cpu.embedding_bag::<T, P>(bags, table.elements(), cols, out.f32s());
        }));
    }

    /// Adds to the gradient of the table of [`Device::embedding_bag`].
    pub(crate) fn embedding_bag_backward(&self, bags: Bags<'_>, dy: View<'_>, mut d_table: ViewMut<'_>) {
        let num_added = bags.ids.len().saturating_mul(dy.shape().cols());
        let cost = Cost::others(&[num_added]).reads(dy.num_bytes()).reads(size_of_val(bags.ids));
        self.count("embedding_bag_backward", cost.updates(num_added.saturating_mul(DType::F32.size())));
        self.cpu.embedding_bag_backward(bags, dy.f32s(), dy.shape().cols(), d_table.f32s());
    }

    /// `d_table[ids[i]] += dy[i]`.
    pub(crate) fn embedding_backward(&self, ids: View<'_>, dy: View<'_>, d_table: ViewMut<'_>) {
        self.embedding_bag_backward(Bags::of_single_ids(ids.u32s()), dy, d_table);
    }

    /// `d_positions[t] += sum over sequences of dy[sequence, t]`.
    pub(crate) fn position_backward(&self, dy: View<'_>, seq_len: usize, mut d_positions: ViewMut<'_>) {
        self.count(
            "position_backward",
            each(dy.shape(), 1).reads(dy.num_bytes()).updates(d_positions.num_bytes()),
        );
        self.cpu.position_backward(dy.f32s(), seq_len, dy.shape().cols(), d_positions.f32s());
    }

    /// Takes a chunk of logits into the `statistics` of their rows, `rows x 3`.
    pub(crate) fn softmax_statistics(
        &self,
        logits: View<'_>,
        targets: View<'_>,
        chunk: VocabularyChunk,
        mut statistics: ViewMut<'_>,
    ) {
        let cost = each(logits.shape(), Cost::EXP + 3).reads(logits.num_bytes());
        self.count("softmax_statistics", cost.updates(statistics.num_bytes()));
        self.cpu.softmax_statistics(logits.f32s(), targets.u32s(), chunk, statistics.f32s());
    }

    /// Gradient of the rows' losses with respect to a chunk of logits, for the statistics of all chunks.
    pub(crate) fn cross_entropy_gradient(
        &self,
        logits: View<'_>,
        targets: View<'_>,
        chunk: VocabularyChunk,
        statistics: View<'_>,
        scale: f32,
        mut gradient: ViewMut<'_>,
    ) {
        let cost =
            each(logits.shape(), Cost::EXP + 2).reads(logits.num_bytes()).reads(statistics.num_bytes());
        self.count("cross_entropy_gradient", cost.writes(gradient.num_bytes()));
        let (logits, targets, statistics) = (logits.f32s(), targets.u32s(), statistics.f32s());
        with_element!(gradient.dtype() => |T| {
            self.cpu.cross_entropy_gradient::<T>(logits, targets, chunk, statistics, scale, gradient.elements());
        });
    }
}

/// Of a normalisation for each element: two sums, a difference, a product with the weight, and a bias.
const NORM_OPERATIONS: usize = 8;

/// Of its gradient for each element: the normalised value, two sums, and what they come to.
const NORM_INPUT_GRADIENT_OPERATIONS: usize = 14;

/// Of the gradient of its weight for each element: the normalised value, a product and a sum.
const NORM_WEIGHT_GRADIENT_OPERATIONS: usize = 4;
