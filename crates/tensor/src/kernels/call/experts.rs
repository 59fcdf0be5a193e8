//! Routing of tokens to experts: choice of experts, dispatch of rows and combination of results.

use super::{each, kernel_calls, num_bytes};
use crate::kernels::{Operand, OperandMut, RoutingRule};
use trireme_base::Cost;

kernel_calls! {
    /// Kernels that route tokens to experts.
    ExpertCall {
        "top_k" => TopK {
            x: Operand, bias: Option<Operand>, row_weights: Option<Operand>, values: OperandMut, ids: OperandMut; rule: RoutingRule
        }
        "top_k_backward" => TopKBackward { x: Operand, ids: Operand, dy: Operand, dx: OperandMut; rule: RoutingRule }
        "expert_loads" => ExpertLoads { ids: Operand, out: OperandMut }
        "excess_loads" => ExcessLoads { ids: Operand, out: OperandMut; accumulate: bool }
        "permute_rows" => PermuteRows { x: Operand, order: Operand, weights: Option<Operand>, y: OperandMut; num_choices: usize }
        "combine_rows" => CombineRows {
            x: Operand, places: Operand, weights: Option<Operand>, residual: Option<Operand>, y: OperandMut
        }
        "row_products" => RowProducts { x: Operand, places: Operand, y: Operand, products: OperandMut }
    }
}

impl ExpertCall {
    pub(crate) fn cost(&self) -> Cost {
        match self {
            Self::TopK { x, bias, row_weights, values, rule, .. } => {
                let k = rule.num_choices;
                let of_groups = rule.groups.map_or(0, |groups| 2 + groups.num_chosen.div_ceil(2));
                let read = x.num_bytes() + num_bytes(bias) + num_bytes(row_weights);
                each(x.shape(), k * k.div_ceil(2) + of_groups).reads(read).writes(2 * values.num_bytes())
            }
            Self::TopKBackward { x, ids, dy, dx, .. } => {
                let read = x.num_bytes() + ids.num_bytes() + dy.num_bytes();
                each(dy.shape(), 4).reads(read).writes(dx.num_bytes())
            }
            Self::ExpertLoads { ids, out } => {
                each(ids.shape(), 1).reads(ids.num_bytes()).writes(out.num_bytes())
            }
            Self::ExcessLoads { ids, out, .. } => {
                each(ids.shape(), 1).reads(ids.num_bytes()).updates(out.num_bytes())
            }
            Self::PermuteRows { x, order, weights, y, .. } => {
                let row_bytes = y.shape().num_elements() * x.dtype().size();
                let read = order.num_bytes() + num_bytes(weights) + row_bytes;
                each(y.shape(), 1).reads(read).writes(y.num_bytes())
            }
            Self::CombineRows { x, places, weights, residual, y } => {
                let read = x.num_bytes() + places.num_bytes() + num_bytes(weights) + num_bytes(residual);
                each(x.shape(), 2).reads(read).writes(y.num_bytes())
            }
            Self::RowProducts { x, places, y, products } => {
                let read = x.num_bytes() + places.num_bytes() + y.num_bytes();
                each(x.shape(), 2).reads(read).writes(products.num_bytes())
            }
        }
    }
}
