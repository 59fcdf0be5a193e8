use super::super::Cuda;
use super::super::launch::{Argument, Words, pair};
use crate::kernels::call::ExpertCall;
use crate::kernels::{ExpertGroups, RoutingRule};

/// `Routing` of `sources/experts.cu`.
impl Argument for RoutingRule {
    fn append(&self, to: &mut Words) -> usize {
        let RoutingRule { num_choices, normalizes, scale, groups } = *self;
        let ExpertGroups { num_groups, num_chosen } =
            groups.unwrap_or(ExpertGroups { num_groups: 0, num_chosen: 0 });
        let factors = pair(normalizes.into(), scale.to_bits());
        [num_choices, num_groups, num_chosen].append(to) + factors.append(to)
    }
}

impl Cuda {
    pub(super) fn run_expert(&self, call: &ExpertCall) {
        match call {
            ExpertCall::TopK { x, rule, bias, row_weights, chosen: [values, ids] } => {
                let launch = self.kernel("top_k", &[]).arg(x).arg(x.shape().cols()).arg(*rule);
                let launch = launch.arg(bias).arg(row_weights).arg(values).arg(ids);
                launch.over_warps(x.shape().rows());
            }
            ExpertCall::TopKBackward { x, rule, chosen: [ids, dy], dx } => {
                let launch = self.kernel("top_k_backward", &[]).arg(x).arg(x.shape().cols()).arg(*rule);
                launch.arg(ids).arg(dy).arg(dx).over_warps(x.shape().rows());
            }
            ExpertCall::ExpertLoads { ids, out } => {
                let launch = self.kernel("expert_loads", &[]).arg(ids).arg(ids.shape().num_elements());
                launch.arg(false).arg(false).arg(out).over_rows(out.shape().num_elements());
            }
            ExpertCall::ExcessLoads { ids, out, accumulate } => {
                let launch = self.kernel("expert_loads", &[]).arg(ids).arg(ids.shape().num_elements());
                launch.arg(true).arg(*accumulate).arg(out).over_rows(out.shape().num_elements());
            }
            ExpertCall::PermuteRows { x, order, weights, y, num_choices } => {
                let launch = self.kernel("permute_rows", &[x.dtype(), y.dtype()]).arg(x);
                let launch = launch.arg(x.shape().rows()).arg(order).arg(num_choices).arg(weights);
                launch.arg(y).arg(x.shape().cols()).over_elements(y.shape());
            }
            ExpertCall::CombineRows { x, positions, weights, residual, y } => {
                let launch = self.kernel("combine_rows", &[x.dtype(), y.dtype()]).arg(x);
                let launch = launch.arg(x.shape().rows()).arg(positions).arg(positions.shape().cols());
                let launch = launch.arg(weights).arg(residual).arg(y).arg(x.shape().cols());
                launch.over_elements(y.shape());
            }
            ExpertCall::RowProducts { x, positions, y, products } => {
                let launch = self.kernel("row_products", &[x.dtype(), y.dtype()]).arg(x);
                let launch = launch.arg(x.shape().rows()).arg(positions).arg(positions.shape().cols());
                let launch = launch.arg(y).arg(products).arg(x.shape().cols());
                launch.over_warps(positions.shape().num_elements());
            }
        }
    }
}
