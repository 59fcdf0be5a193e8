//! Normalisations, embeddings and cross-entropies on a device.

use super::{Device, each, written};
use crate::kernels::Place;
use crate::kernels::cpu::Cpu;
use crate::kernels::cpu::cross_entropy::VocabularyChunk;
use crate::kernels::cpu::element::with_element;
use crate::kernels::cpu::embedding::Bags;
use crate::kernels::cpu::norm::{NormKind, Normalised};
use crate::parameter_table::SpanPart;
use crate::precision::Precision;
use crate::tensor::{View, ViewMut};
use trireme_base::{Cost, DType, Positions};

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
        let cost = each(x.shape(), NORM_OPERATIONS).reads(x.num_bytes());
        let (x, weight, bias) = (x.place(), weight.place(), bias.map(|bias| bias.place()));
        let (mut y, mut statistics) = (y.into_place(), statistics.into_place());
        self.issue("norm", cost.writes(y.num_bytes()).writes(statistics.num_bytes()), move |cpu| {
            let (x, weight, bias) = (x.f32s(cpu), weight.f32s(cpu), bias.map(|bias| bias.f32s(cpu)));
            with_element!(y.dtype() => |T| {
                cpu.norm::<T>(x, weight, bias, kind, y.elements(cpu), statistics.f32s(cpu));
            });
        });
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
        let cost = each(x.shape(), NORM_INPUT_GRADIENT_OPERATIONS).reads(x.num_bytes()).reads(dy.num_bytes());
        let cost = written(cost, &dx, accumulate);
        let (x, weight, statistics) = (x.place(), weight.place(), statistics.place());
        let (dy, mut dx) = (dy.place(), dx.into_place());
        self.issue("norm_backward_input", cost, move |cpu| {
            let (x, weight, statistics) = (x.f32s(cpu), weight.f32s(cpu), statistics.f32s(cpu));
            let rows = Normalised { x, weight, statistics, kind };
            with_element!(dy.dtype() => |T| {
                cpu.norm_backward_input::<T>(rows, dy.elements(cpu), dx.f32s(cpu), accumulate);
            });
        });
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
        let cost =
            each(x.shape(), NORM_WEIGHT_GRADIENT_OPERATIONS).reads(x.num_bytes()).reads(dy.num_bytes());
        let cost = written(cost, &d_weight, accumulate);
        let (x, dy, statistics, mut d_weight) =
            (x.place(), dy.place(), statistics.place(), d_weight.into_place());
        self.issue("norm_backward_weight", cost, move |cpu| {
            let (x, statistics, d_weight) = (x.f32s(cpu), statistics.f32s(cpu), d_weight.f32s(cpu));
            with_element!(dy.dtype() => |T| {
                cpu.norm_backward_weight::<T>(x, dy.elements(cpu), statistics, d_weight, accumulate);
            });
        });
    }

    /// `y = x` rounded to `precision`, in f32.
    ///
    /// # Panics
    /// If the shapes differ.
    pub(crate) fn round(&self, precision: Precision, x: View<'_>, y: ViewMut<'_>) {
        assert_eq!(x.shape(), y.shape());
        let (x, mut y) = (x.place(), y.into_place());
        self.issue("round", Cost::ZERO.reads(x.num_bytes()).writes(y.num_bytes()), move |cpu| {
            with_element!(x.dtype() => |T| with_element!(precision.dtype() => |P| {
                cpu.round::<T, P>(x.elements(cpu), y.f32s(cpu));
            }));
        });
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
        let num_elements = out.shape().num_elements();
        let cost = Cost::others(&[usize::from(positions.is_some()), num_elements]).reads(ids.num_bytes());
        let cost = cost.reads(num_elements * table.dtype().size()).writes(out.num_bytes());
        let (ids, table, positions) =
            (ids.place(), table.place(), positions.map(|positions| positions.place()));
        let mut out = out.into_place();
        self.issue("embedding", cost, move |cpu| {
            with_element!(table.dtype() => |T| with_element!(precision.dtype() => |P| {
                let positions = positions.map(|positions| positions.elements(cpu));
                let (ids, table) = (ids.u32s(cpu), table.elements(cpu));
                cpu.embedding::<T, P>(ids, table, positions, at, out.f32s(cpu));
            }));
        });
    }

    /// Sums of rows of a table, `[rows, cols]`, rounded to `precision`, by bags of ids: `[bags, cols]`.
    pub(crate) fn embedding_bag(
        &self,
        precision: Precision,
        bags: BagViews<'_>,
        table: View<'_>,
        out: ViewMut<'_>,
    ) {
        let cols = out.shape().cols();
        let num_read = bags.num_ids().saturating_mul(cols);
        let cost = Cost::others(&[num_read]).reads(bags.ids.num_bytes());
        let cost = cost.reads(num_read.saturating_mul(table.dtype().size())).writes(out.num_bytes());
        let (bags, table, mut out) = (bags.places(), table.place(), out.into_place());
        self.issue("embedding_bag", cost, move |cpu| {
            with_element!(table.dtype() => |T| with_element!(precision.dtype() => |P| {
                cpu.embedding_bag::<T, P>(bags.elements(cpu), table.elements(cpu), cols, out.f32s(cpu));
            }));
        });
    }

    /// Adds the rows of `dy`, `[bags, cols]`, to the gradient of the table of [`Device::embedding_bag`].
    pub(crate) fn embedding_bag_backward(&self, bags: BagViews<'_>, dy: View<'_>, d_table: ViewMut<'_>) {
        let cols = dy.shape().cols();
        let num_added = bags.num_ids().saturating_mul(cols);
        let cost = Cost::others(&[num_added]).reads(dy.num_bytes()).reads(bags.ids.num_bytes());
        let cost = cost.updates(num_added.saturating_mul(DType::F32.size()));
        let (bags, dy, mut d_table) = (bags.places(), dy.place(), d_table.into_place());
        self.issue("embedding_bag_backward", cost, move |cpu| {
            cpu.embedding_bag_backward(bags.elements(cpu), dy.f32s(cpu), cols, d_table.f32s(cpu));
        });
    }

    /// `d_table[ids[i]] += dy[i]`.
    pub(crate) fn embedding_backward(&self, ids: View<'_>, dy: View<'_>, d_table: ViewMut<'_>) {
        self.embedding_bag_backward(BagViews::of_single_ids(ids), dy, d_table);
    }

    /// `d_positions[at(t)] += sum over sequences of dy[sequence, t]`.
    pub(crate) fn position_backward(&self, dy: View<'_>, at: Positions, d_positions: ViewMut<'_>) {
        let cols = dy.shape().cols();
        let num_updated = at.len().saturating_mul(cols).saturating_mul(DType::F32.size());
        let cost = each(dy.shape(), 1).reads(dy.num_bytes()).updates(num_updated);
        let (dy, mut d_positions) = (dy.place(), d_positions.into_place());
        self.issue("position_backward", cost, move |cpu| {
            cpu.position_backward(dy.f32s(cpu), at, cols, d_positions.f32s(cpu));
        });
    }

    /// Takes a chunk of logits, `[rows, chunk]`, into the `statistics` of their rows, `[rows, 3]`.
    pub(crate) fn softmax_statistics(
        &self,
        logits: View<'_>,
        targets: View<'_>,
        chunk: VocabularyChunk,
        statistics: ViewMut<'_>,
    ) {
        let cost = each(logits.shape(), Cost::EXP + 3).reads(logits.num_bytes());
        let cost = cost.updates(statistics.num_bytes());
        let (logits, targets, mut statistics) = (logits.place(), targets.place(), statistics.into_place());
        self.issue("softmax_statistics", cost, move |cpu| {
            cpu.softmax_statistics(logits.f32s(cpu), targets.u32s(cpu), chunk, statistics.f32s(cpu));
        });
    }

    /// Statistics of the rows, `[rows, 3]`, from those that ranks have of their parts of the vocabulary, `[ranks, rows, 3]`.
    pub(crate) fn merge_statistics(&self, parts: View<'_>, statistics: ViewMut<'_>) {
        let cost = each(parts.shape(), Cost::EXP).reads(parts.num_bytes()).writes(statistics.num_bytes());
        let (parts, mut statistics) = (parts.place(), statistics.into_place());
        self.issue("merge_statistics", cost, move |cpu| {
            cpu.merge_statistics(parts.f32s(cpu), statistics.f32s(cpu));
        });
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
        let cost =
            each(logits.shape(), Cost::EXP + 2).reads(logits.num_bytes()).reads(statistics.num_bytes());
        let cost = cost.writes(gradient.num_bytes());
        let (logits, targets, statistics) = (logits.place(), targets.place(), statistics.place());
        let weights = weights.map(|weights| weights.place());
        let mut gradient = gradient.into_place();
        self.issue("cross_entropy_gradient", cost, move |cpu| {
            let (logits, targets, statistics) = (logits.f32s(cpu), targets.u32s(cpu), statistics.f32s(cpu));
            with_element!(gradient.dtype() => |T| {
                let gradient = gradient.elements(cpu);
                let scale = (scale, weights.as_ref().map(|weights| weights.f32s(cpu)));
                cpu.cross_entropy_gradient::<T>(logits, targets, chunk, statistics, scale, gradient);
            });
        });
    }
}

/// Ids in bags of equal length, of which only the first may count.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BagViews<'a> {
    /// A row is a bag.
    pub(crate) ids: View<'a>,
    /// Ids of each bag that count; `None` if all do.
    pub(crate) lens: Option<View<'a>>,
    /// Whether sums are divided by the number of ids.
    pub(crate) takes_mean: bool,
    bag_len: usize,
    part: Option<(usize, usize)>,
}

impl<'a> BagViews<'a> {
    pub(crate) fn new(ids: View<'a>, lens: Option<View<'a>>, takes_mean: bool) -> Self {
        BagViews { ids, lens, takes_mean, bag_len: ids.shape().cols(), part: None }
    }

    /// One id a bag.
    pub(crate) fn of_single_ids(ids: View<'a>) -> Self {
        BagViews { ids, lens: None, takes_mean: false, bag_len: 1, part: None }
    }

    /// The same for the part of a table that a rank of the tensor axis has.
    ///
    /// # Panics
    /// If the table is not cut by its rows.
    pub(crate) fn of_part(self, part: Option<SpanPart>) -> Self {
        assert!(part.is_none_or(|part| part.dim == 0), "a table is cut by its rows");
        BagViews { part: part.map(|part| (part.start, part.len)), ..self }
    }

    fn num_ids(&self) -> usize {
        self.ids.shape().num_elements()
    }

    fn places(&self) -> BagPlaces {
        let (ids, lens) = (self.ids.place(), self.lens.map(|lens| lens.place()));
        BagPlaces { ids, lens, takes_mean: self.takes_mean, bag_len: self.bag_len, part: self.part }
    }
}

/// The places of [`BagViews`].
struct BagPlaces {
    ids: Place,
    lens: Option<Place>,
    takes_mean: bool,
    bag_len: usize,
    part: Option<(usize, usize)>,
}

impl BagPlaces {
    fn elements<'c>(&self, cpu: &'c Cpu) -> Bags<'c> {
        let lens = self.lens.map(|lens| lens.u32s(cpu));
        Bags {
            ids: self.ids.u32s(cpu),
            bag_len: self.bag_len,
            lens,
            takes_mean: self.takes_mean,
            part: self.part,
        }
    }
}

/// Of a normalisation for each element: two sums, a difference, a product with the weight, and a bias.
const NORM_OPERATIONS: usize = 8;

/// Of its gradient for each element: the normalised value, two sums, and what they come to.
const NORM_INPUT_GRADIENT_OPERATIONS: usize = 14;

/// Of the gradient of its weight for each element: the normalised value, a product and a sum.
const NORM_WEIGHT_GRADIENT_OPERATIONS: usize = 4;
