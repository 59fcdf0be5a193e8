//! Routing kernels: choice of experts, dispatch of tokens and combination of expert outputs.

use super::Device;
use crate::kernels::call::ExpertCall;
use crate::kernels::{ChosenGroups, RoutingRule};
use crate::tensor::{View, ViewMut};

impl Device {
    /// Chooses the top experts for each row of `x` (`[rows, cols]`, f32) by `rule`. Writes their scores to `values` (`[rows, num_choices]`,
    /// f32) and their indices to `ids` (u32). `bias` (`[cols]`, f32) is added to scores only for the comparison. Choices are in descending
    /// order; of equal ones, the lower index comes first. A row whose weight in `row_weights` (`[rows]`, f32) is 0 chooses no expert: its
    /// values are 0, and its ids are `cols`.
    ///
    /// Panics if there are fewer than `num_choices` experts in the chosen groups, if groups are unequal, or if there are too many groups.
    pub(crate) fn top_k(
        &self,
        x: View<'_>,
        rule: RoutingRule,
        bias: Option<View<'_>>,
        row_weights: Option<View<'_>>,
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
        let [bias, row_weights] = [bias, row_weights].map(|view| view.map(View::operand));
        let (x, values, ids) = (x.operand(), values.into_operand(), ids.into_operand());
        self.issue(ExpertCall::TopK { x, bias, row_weights, values, ids, rule });
    }

    /// Computes the gradient of the rows `x` of [`top_k`](Device::top_k) from the gradient `dy` of `values`.
    pub(crate) fn top_k_backward(
        &self,
        x: View<'_>,
        rule: RoutingRule,
        [ids, dy]: [View<'_>; 2],
        dx: ViewMut<'_>,
    ) {
        let [x, ids, dy] = [x, ids, dy].map(View::operand);
        self.issue(ExpertCall::TopKBackward { x, ids, dy, dx: dx.into_operand(), rule });
    }

    /// Counts how often each expert occurs in `ids` (u32) and writes the counts to `out` (`[num_experts]`, f32), exact up to 2^24. The id
    /// `num_experts` means no expert.
    ///
    /// Panics if an id is larger.
    pub(crate) fn expert_loads(&self, ids: View<'_>, out: ViewMut<'_>) {
        self.issue(ExpertCall::ExpertLoads { ids: ids.operand(), out: out.into_operand() });
    }

    /// Writes to `out` (`[num_experts]`, f32), or adds to it, how often each expert occurs in `ids` (u32), minus the mean over all experts.
    /// The id `num_experts` means no expert.
    ///
    /// Panics if an id is larger.
    pub(crate) fn excess_loads(&self, ids: View<'_>, out: ViewMut<'_>, accumulate: bool) {
        self.issue(ExpertCall::ExcessLoads { ids: ids.operand(), out: out.into_operand(), accumulate });
    }

    /// Computes `y[i] = weights[c] x[c / num_choices]`, where `c = order[i]`: one copy of a token's row for each of its choices.
    ///
    /// Panics if a choice belongs to no token.
    pub(crate) fn permute_rows(
        &self,
        x: View<'_>,
        order: View<'_>,
        num_choices: usize,
        weights: Option<View<'_>>,
        y: ViewMut<'_>,
    ) {
        let weights = weights.map(View::operand);
        let (x, order, y) = (x.operand(), order.operand(), y.into_operand());
        self.issue(ExpertCall::PermuteRows { x, order, weights, y, num_choices });
    }

    /// Computes `y[t] = residual[t] + sum over the choices c of token t of weights[t, c] x[places[t, c]]` for rows, in the order of the
    /// choices. Sums are f32, rounded once. Weights and residual are f32.
    ///
    /// Panics if a place is not the index of a row of `x`, if `weights` does not have the shape of `places`, or if `residual` does not have
    /// the shape of `y`.
    pub(crate) fn combine_rows(
        &self,
        x: View<'_>,
        places: View<'_>,
        weights: Option<View<'_>>,
        residual: Option<View<'_>>,
        y: ViewMut<'_>,
    ) {
        let is_of_choices = |weights: View<'_>| weights.shape() == places.shape();
        assert!(weights.is_none_or(is_of_choices), "{weights:?} for {:?}", places.shape());
        let is_of_tokens = |residual: View<'_>| residual.shape() == y.shape();
        assert!(residual.is_none_or(is_of_tokens), "{residual:?} for {:?}", y.shape());
        let [weights, residual] = [weights, residual].map(|view| view.map(View::operand));
        let (x, places, y) = (x.operand(), places.operand(), y.into_operand());
        self.issue(ExpertCall::CombineRows { x, places, weights, residual, y });
    }

    /// Computes the dot products `products[t, c] = sum of x[places[t, c]] y[t]` of rows, as f32: the gradient of the weights of
    /// [`combine_rows`](Device::combine_rows).
    ///
    /// Panics if a place is not the index of a row of `x`.
    pub(crate) fn row_products(&self, x: View<'_>, places: View<'_>, y: View<'_>, products: ViewMut<'_>) {
        assert_eq!(products.shape(), places.shape());
        let [x, places, y] = [x, places, y].map(View::operand);
        self.issue(ExpertCall::RowProducts { x, places, y, products: products.into_operand() });
    }
}
