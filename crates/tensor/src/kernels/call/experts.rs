//! Routing of tokens to experts: choice of experts, dispatch of rows and combination of results.

use super::{kernel_calls, num_bytes, per_element_cost, plain_arguments};
use crate::kernels::{ExpertGroups, Operand, RoutingRule};
use crate::view::{View, ViewMut};
use trireme_base::Cost;

kernel_calls! {
    /// Kernels that route tokens to experts.
    ExpertCall {
        /// Chooses the top experts for each row of `x` (`[rows, cols]`, f32) by `rule`. Writes their scores (`[rows, num_choices]`, f32)
        /// and their indices (u32) to `chosen`. `bias` (`[cols]`, f32) is added to scores only for the comparison. Choices are in
        /// descending order; of equal ones, the lower index comes first. A row whose weight in `row_weights` (`[rows]`, f32) is 0 chooses
        /// no expert: its scores are 0, and its indices are `cols`.
        ///
        /// Panics if there are fewer than `num_choices` experts in the chosen groups, if groups are unequal, or if there are too many
        /// groups.
        pub(crate) fn top_k => TopK {
            x: View, rule: RoutingRule, bias: Option<View>, row_weights: Option<View>, chosen: [ViewMut; 2];
            check_choice(&rule, x.shape().cols());
            assert_eq!((chosen[0].shape().cols(), chosen[1].shape()), (rule.num_choices, chosen[0].shape()));
            let has_row = |weights: Operand| weights.shape().num_elements() == x.shape().rows();
            assert!(row_weights.is_none_or(has_row), "{row_weights:?} of {:?}", x.shape());
        }

        /// Computes the gradient of the rows `x` of [`top_k`](crate::Device::top_k) from the chosen indices and the gradient of their
        /// scores.
        pub(crate) fn top_k_backward => TopKBackward {
            x: View, rule: RoutingRule, chosen: [View; 2], dx: ViewMut
        }

        /// Counts how often each expert occurs in `ids` (u32) and writes the counts to `out` (`[num_experts]`, f32), exact up to 2^24. The
        /// id `num_experts` means no expert.
        ///
        /// Panics if an id is larger.
        pub(crate) fn expert_loads => ExpertLoads { ids: View, out: ViewMut }

        /// Writes to `out` (`[num_experts]`, f32), or adds to it, how often each expert occurs in `ids` (u32), minus the mean over all
        /// experts. The id `num_experts` means no expert.
        ///
        /// Panics if an id is larger.
        pub(crate) fn excess_loads => ExcessLoads { ids: View, out: ViewMut, accumulate: bool }

        /// Computes `y[i] = weights[c] x[c / num_choices]`, where `c = order[i]`: one copy of a token's row for each of its choices.
        ///
        /// Panics if a choice belongs to no token.
        pub(crate) fn permute_rows => PermuteRows {
            x: View, order: View, num_choices: usize, weights: Option<View>, y: ViewMut
        }

        /// Computes `y[t] = residual[t] + sum over the choices c of token t of weights[t, c] x[positions[t, c]]` for rows, in the order of
        /// the choices. Sums are f32, rounded once. Weights and residual are f32.
        ///
        /// Panics if a position is not the index of a row of `x`, if `weights` does not have the shape of `positions`, or if `residual`
        /// does not have the shape of `y`.
        pub(crate) fn combine_rows => CombineRows {
            x: View, positions: View, weights: Option<View>, residual: Option<View>, y: ViewMut;
            assert!(weights.is_none_or(|weights| weights.shape() == positions.shape()), "{weights:?} for {:?}", positions.shape());
            assert!(residual.is_none_or(|residual| residual.shape() == y.shape()), "{residual:?} for {:?}", y.shape());
        }

        /// Computes the dot products `products[t, c] = sum of x[positions[t, c]] y[t]` of rows, as f32: the gradient of the weights of
        /// [`combine_rows`](crate::Device::combine_rows).
        ///
        /// Panics if a position is not the index of a row of `x`.
        pub(crate) fn row_products => RowProducts {
            x: View, positions: View, y: View, products: ViewMut; assert_eq!(products.shape(), positions.shape());
        }
    }
}

plain_arguments! { RoutingRule }

/// Panics if `rule` cannot be applied to `num_experts` experts.
fn check_choice(rule: &RoutingRule, num_experts: usize) {
    let mut num_left = num_experts;
    if let Some(ExpertGroups { num_groups, num_chosen }) = rule.groups {
        let is_possible = num_groups <= ExpertGroups::NUM_MAX && num_chosen <= num_groups;
        assert!(
            is_possible && num_experts.is_multiple_of(num_groups),
            "{num_experts} experts, of which {rule:?}"
        );
        num_left = num_experts / num_groups * num_chosen;
    }
    assert!(rule.num_choices <= num_left, "the {} largest of {num_left}", rule.num_choices);
}

impl ExpertCall {
    pub(crate) fn cost(&self) -> Cost {
        match self {
            Self::TopK { x, rule, bias, row_weights, chosen } => {
                let k = rule.num_choices;
                let of_groups = rule.groups.map_or(0, |groups| 2 + groups.num_chosen.div_ceil(2));
                let read = x.num_bytes() + num_bytes(bias) + num_bytes(row_weights);
                per_element_cost(x.shape(), k * k.div_ceil(2) + of_groups)
                    .reads(read)
                    .writes(2 * chosen[0].num_bytes())
            }
            Self::TopKBackward { x, chosen: [ids, dy], dx, .. } => {
                let read = x.num_bytes() + ids.num_bytes() + dy.num_bytes();
                per_element_cost(dy.shape(), 4).reads(read).writes(dx.num_bytes())
            }
            Self::ExpertLoads { ids, out } => {
                per_element_cost(ids.shape(), 1).reads(ids.num_bytes()).writes(out.num_bytes())
            }
            Self::ExcessLoads { ids, out, .. } => {
                per_element_cost(ids.shape(), 1).reads(ids.num_bytes()).updates(out.num_bytes())
            }
            Self::PermuteRows { x, order, weights, y, .. } => {
                let row_bytes = y.shape().num_elements() * x.dtype().size();
                let read = order.num_bytes() + num_bytes(weights) + row_bytes;
                per_element_cost(y.shape(), 1).reads(read).writes(y.num_bytes())
            }
            Self::CombineRows { x, positions, weights, residual, y } => {
                let read = x.num_bytes() + positions.num_bytes() + num_bytes(weights) + num_bytes(residual);
                per_element_cost(x.shape(), 2).reads(read).writes(y.num_bytes())
            }
            Self::RowProducts { x, positions, y, products } => {
                let read = x.num_bytes() + positions.num_bytes() + y.num_bytes();
                per_element_cost(x.shape(), 2).reads(read).writes(products.num_bytes())
            }
        }
    }
}
