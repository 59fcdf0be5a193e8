//! What brings tokens to experts and back, on a device.

use super::{Device, each};
use crate::kernels::cpu::element::with_element;
use crate::kernels::cpu::experts::Chosen;
use crate::kernels::{ChosenGroups, RoutingRule};
use crate::tensor::{View, ViewMut};

impl Device {
    /// For each row of `x` (`[rows, cols]`, f32) the experts that are chosen for it: their scores as `values` (`[rows, num_choices]`, f32), as the
    /// rule says, and which they are as `ids` (u32). `bias` (`[cols]`, f32) is added to scores where they are compared. The largest comes
    /// first, and of equal ones the first. A row whose weight in `row_weights` (`[rows]`, f32) is 0 is given to no expert: its values are 0, and its ids
    /// are `cols`.
    ///
    /// # Panics
    /// If rows have fewer elements, or if groups are unequal, too many, or too few to have so many experts.
    pub(crate) fn top_k(
        &self,
        x: View<'_>,
        (rule, bias, row_weights): (RoutingRule, Option<View<'_>>, Option<View<'_>>),
        [values, ids]: [ViewMut<'_>; 2],
    ) {
        let (cols, k) = (x.shape().cols(), rule.num_choices);
        let mut num_left = cols;
        if let Some(ChosenGroups { num_groups, num_chosen }) = rule.groups {
            let is_possible = num_groups <= ChosenGroups::NUM_MAX && num_chosen <= num_groups;
            assert!(is_possible && cols.is_multiple_of(num_groups), "{cols} experts, of which {rule:?}");
            num_left = cols / num_groups * num_chosen;
        }
        assert!(k <= num_left, "the {k} largest of {num_left}");
        assert_eq!((values.shape().cols(), ids.shape()), (k, values.shape()));
        let has_row = |weights: View<'_>| weights.shape().num_elements() == x.shape().rows();
        assert!(row_weights.is_none_or(has_row), "{row_weights:?} of {:?}", x.shape());
        let num_bytes = |view: Option<View<'_>>| view.map_or(0, |view| view.num_bytes());
        let read = x.num_bytes() + num_bytes(bias) + num_bytes(row_weights);
        let of_groups = rule.groups.map_or(0, |groups| 2 + groups.num_chosen.div_ceil(2));
        let cost = each(x.shape(), k * k.div_ceil(2) + of_groups).reads(read).writes(2 * values.num_bytes());
        let x = x.place();
        let [bias, row_weights] = [bias, row_weights].map(|view| view.map(|view| view.place()));
        let (mut values, mut ids) = (values.into_place(), ids.into_place());
        self.issue("top_k", cost, move |cpu| {
            let [bias, row_weights] =
                [&bias, &row_weights].map(|place| place.as_ref().map(|place| place.f32s(cpu)));
            cpu.top_k((x.f32s(cpu), cols), (rule, bias, row_weights), (values.f32s(cpu), ids.words(cpu)));
        });
    }

    /// The gradient of the rows `x` of [`top_k`](Device::top_k), from that of the values, `dy`.
    pub(crate) fn top_k_backward(
        &self,
        x: View<'_>,
        rule: RoutingRule,
        [ids, dy]: [View<'_>; 2],
        dx: ViewMut<'_>,
    ) {
        let cols = x.shape().cols();
        let read = x.num_bytes() + ids.num_bytes() + dy.num_bytes();
        let cost = each(dy.shape(), 4).reads(read).writes(dx.num_bytes());
        let (x, ids, dy, mut dx) = (x.place(), ids.place(), dy.place(), dx.into_place());
        self.issue("top_k_backward", cost, move |cpu| {
            let given = (ids.u32s(cpu), dy.f32s(cpu));
            cpu.top_k_backward((x.f32s(cpu), cols), rule, given, dx.f32s(cpu));
        });
    }

    /// Counts how often each expert occurs in `ids` (u32), as `out` (`[num_experts]`, f32), exactly up to 2^24. The id `num_experts` is that of no
    /// expert.
    ///
    /// # Panics
    /// If an id is larger.
    pub(crate) fn expert_loads(&self, ids: View<'_>, out: ViewMut<'_>) {
        let cost = each(ids.shape(), 1).reads(ids.num_bytes()).writes(out.num_bytes());
        let (ids, mut out) = (ids.place(), out.into_place());
        self.issue("expert_loads", cost, move |cpu| cpu.expert_loads(ids.u32s(cpu), out.f32s(cpu)));
    }

    /// Computes how often each expert occurs in `ids` (u32), less its part if all occurred equally often, as `out` (`[num_experts]`, f32), or adds it to
    /// that. The id `num_experts` is that of no expert.
    ///
    /// # Panics
    /// If an id is larger.
    pub(crate) fn excess_loads(&self, ids: View<'_>, out: ViewMut<'_>, accumulate: bool) {
        let cost = each(ids.shape(), 1).reads(ids.num_bytes()).updates(out.num_bytes());
        let (ids, mut out) = (ids.place(), out.into_place());
        self.issue("excess_loads", cost, move |cpu| {
            cpu.excess_loads(ids.u32s(cpu), out.f32s(cpu), accumulate);
        });
    }

    /// `y[i] = weights[c] x[c / num_choices]`, where `c` is `order[i]`: the rows of tokens, for each of their choices.
    ///
    /// # Panics
    /// If a choice is of no token.
    pub(crate) fn spread_rows(
        &self,
        x: View<'_>,
        (order, num_choices, weights): (View<'_>, usize, Option<View<'_>>),
        y: ViewMut<'_>,
    ) {
        let cols = x.shape().cols();
        let row_bytes = y.shape().num_elements() * x.dtype().size();
        let read = order.num_bytes() + weights.map_or(0, |weights| weights.num_bytes()) + row_bytes;
        let cost = each(y.shape(), 1).reads(read).writes(y.num_bytes());
        let (x, order, weights, mut y) =
            (x.place(), order.place(), weights.map(|w| w.place()), y.into_place());
        self.issue("spread_rows", cost, move |cpu| {
            let weights = weights.as_ref().map(|weights| weights.f32s(cpu));
            with_element!(x.dtype() => |X| with_element!(y.dtype() => |Y| {
                let of_choices = (order.u32s(cpu), num_choices, weights);
                cpu.spread_rows::<X, Y>((x.elements(cpu), cols), of_choices, y.elements(cpu));
            }));
        });
    }

    /// `y[t] = residual[t] + sum over the choices c of token t of weights[t, c] x[places[t, c]]`, of rows, in the order of the choices; in f32,
    /// rounded once. Weights and residual are f32.
    ///
    /// # Panics
    /// If a place is that of no row, or weights and residual are not of the shapes of places and `y`.
    pub(crate) fn combine_rows(
        &self,
        x: View<'_>,
        (places, weights): (View<'_>, Option<View<'_>>),
        residual: Option<View<'_>>,
        y: ViewMut<'_>,
    ) {
        let (cols, num_choices) = (x.shape().cols(), places.shape().cols());
        let is_of_choices = |weights: View<'_>| weights.shape() == places.shape();
        assert!(weights.is_none_or(is_of_choices), "{weights:?} for {:?}", places.shape());
        let is_of_tokens = |residual: View<'_>| residual.shape() == y.shape();
        assert!(residual.is_none_or(is_of_tokens), "{residual:?} for {:?}", y.shape());
        let optional = |view: Option<View<'_>>| view.map_or(0, |view| view.num_bytes());
        let read = x.num_bytes() + places.num_bytes() + optional(weights) + optional(residual);
        let cost = each(x.shape(), 2).reads(read).writes(y.num_bytes());
        let (x, places, mut y) = (x.place(), places.place(), y.into_place());
        let [weights, residual] = [weights, residual].map(|view| view.map(|view| view.place()));
        self.issue("combine_rows", cost, move |cpu| {
            let [weights, residual] =
                [&weights, &residual].map(|place| place.as_ref().map(|place| place.f32s(cpu)));
            let chosen = Chosen { places: places.u32s(cpu), num_choices, weights };
            with_element!(x.dtype() => |X| with_element!(y.dtype() => |Y| {
                cpu.combine_rows::<X, Y>((x.elements(cpu), cols), chosen, residual, y.elements(cpu));
            }));
        });
    }

    /// `products[t, c] = sum of x[places[t, c]] y[t]`, of rows, as f32: the gradient of the weights of
    /// [`combine_rows`](Device::combine_rows).
    ///
    /// # Panics
    /// If a place is that of no row.
    pub(crate) fn row_products(&self, x: View<'_>, places: View<'_>, y: View<'_>, products: ViewMut<'_>) {
        let (cols, num_choices) = (x.shape().cols(), places.shape().cols());
        assert_eq!(products.shape(), places.shape());
        let read = x.num_bytes() + places.num_bytes() + y.num_bytes();
        let cost = each(x.shape(), 2).reads(read).writes(products.num_bytes());
        let (x, places, y, mut products) = (x.place(), places.place(), y.place(), products.into_place());
        self.issue("row_products", cost, move |cpu| {
            with_element!(x.dtype() => |X| with_element!(y.dtype() => |Y| {
                let places = (places.u32s(cpu), num_choices);
                let y = y.elements::<Y>(cpu);
                cpu.row_products::<X, Y>((x.elements(cpu), cols), places, y, products.f32s(cpu));
            }));
        });
    }
}
