use super::Cpu;
use crate::kernels::call::ExpertCall;
use crate::kernels::cpu::element::with_element;
use crate::kernels::cpu::experts::{ChosenRows, Routing};

impl Cpu {
    pub(super) fn run_expert(&self, call: ExpertCall) {
        match call {
            ExpertCall::TopK { x, rule, bias, row_weights, chosen: [mut values, mut ids] } => {
                let [bias, row_weights] = [bias, row_weights].map(|operand| self.optional_f32s(operand));
                let routing = Routing { rule, bias, row_weights };
                let (values, ids) = (values.f32s(self), ids.u32s(self));
                self.top_k(x.f32s(self), x.shape().cols(), routing, values, ids);
            }
            ExpertCall::TopKBackward { x, rule, chosen: [ids, dy], mut dx } => {
                let (cols, ids, dy) = (x.shape().cols(), ids.u32s(self), dy.f32s(self));
                self.top_k_backward(x.f32s(self), cols, rule, ids, dy, dx.f32s(self));
            }
            ExpertCall::ExpertLoads { ids, mut out } => self.expert_loads(ids.u32s(self), out.f32s(self)),
            ExpertCall::ExcessLoads { ids, mut out, accumulate } => {
                self.excess_loads(ids.u32s(self), out.f32s(self), accumulate);
            }
            ExpertCall::PermuteRows { x, order, weights, mut y, num_choices } => {
                let (cols, order) = (x.shape().cols(), order.u32s(self));
                let weights = self.optional_f32s(weights);
                with_element!(x.dtype() => |X| with_element!(y.dtype() => |Y| {
                    let (x, y) = (x.elements(self), y.elements(self));
                    self.permute_rows::<X, Y>(x, cols, order, num_choices, weights, y);
                }));
            }
            ExpertCall::CombineRows { x, positions, weights, residual, mut y } => {
                let (cols, num_choices) = (x.shape().cols(), positions.shape().cols());
                let [weights, residual] = [weights, residual].map(|operand| self.optional_f32s(operand));
                let chosen = ChosenRows { positions: positions.u32s(self), num_choices, weights };
                with_element!(x.dtype() => |X| with_element!(y.dtype() => |Y| {
                    self.combine_rows::<X, Y>(x.elements(self), cols, chosen, residual, y.elements(self));
                }));
            }
            ExpertCall::RowProducts { x, positions, y, mut products } => {
                let (cols, num_choices) = (x.shape().cols(), positions.shape().cols());
                let positions = positions.u32s(self);
                with_element!(x.dtype() => |X| with_element!(y.dtype() => |Y| {
                    let (x, y) = (x.elements(self), y.elements(self));
                    self.row_products::<X, Y>(x, cols, positions, num_choices, y, products.f32s(self));
                }));
            }
        }
    }
}
