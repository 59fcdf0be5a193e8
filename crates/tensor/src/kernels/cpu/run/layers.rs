use super::Cpu;
use crate::kernels::call::LayerCall;
use crate::kernels::cpu::element::with_element;

impl Cpu {
    pub(super) fn run_layer(&self, call: LayerCall) {
        match call {
            LayerCall::Norm { x, weight, bias, mut y, mut statistics, kind } => {
                let (x, weight, bias) = (x.f32s(self), weight.f32s(self), self.optional_f32s(bias));
                with_element!(y.dtype() => |T| {
                    self.norm::<T>(x, weight, bias, kind, y.elements(self), statistics.f32s(self));
                });
            }
            LayerCall::NormBackwardInput { rows, kind, dy, mut dx, accumulate } => {
                let rows = rows.map(|array| array.f32s(self));
                with_element!(dy.dtype() => |T| {
                    self.norm_backward_input::<T>(rows, kind, dy.elements(self), dx.f32s(self), accumulate);
                });
            }
            LayerCall::NormBackwardWeight { x, dy, statistics, mut d_weight, accumulate } => {
                let (x, statistics, d_weight) = (x.f32s(self), statistics.f32s(self), d_weight.f32s(self));
                with_element!(dy.dtype() => |T| {
                    self.norm_backward_weight::<T>(x, dy.elements(self), statistics, d_weight, accumulate);
                });
            }
            LayerCall::Round { x, mut y, precision } => {
                with_element!(x.dtype() => |T| with_element!(precision.dtype() => |P| {
                    self.round::<T, P>(x.elements(self), y.f32s(self));
                }));
            }
            LayerCall::Embedding { ids, table, position_table, mut out, precision, row_positions } => {
                with_element!(table.dtype() => |T| with_element!(precision.dtype() => |P| {
                    let positions = position_table.map(|positions| positions.elements(self));
                    let (ids, table) = (ids.u32s(self), table.elements(self));
                    self.embedding::<T, P>(ids, table, positions, row_positions, out.f32s(self));
                }));
            }
            LayerCall::AddPositions { x, table, first_row, row_positions, mut out } => {
                let (cols, table) = (out.shape().cols(), table.f32s(self));
                self.add_positions(x.f32s(self), table, cols, first_row, row_positions, out.f32s(self));
            }
            LayerCall::EmbeddingBag { bags, table, mut out, precision } => {
                let (bags, cols) = (bags.map(|ids| ids.u32s(self)), out.shape().cols());
                with_element!(table.dtype() => |T| with_element!(precision.dtype() => |P| {
                    self.embedding_bag::<T, P>(bags, table.elements(self), cols, out.f32s(self));
                }));
            }
            LayerCall::EmbeddingBagBackward { bags, dy, mut d_table } => {
                let (bags, cols) = (bags.map(|ids| ids.u32s(self)), dy.shape().cols());
                self.embedding_bag_backward(bags, dy.f32s(self), cols, d_table.f32s(self));
            }
            LayerCall::PositionBackward { dy, mut d_positions, row_positions } => {
                self.position_backward(
                    dy.f32s(self),
                    row_positions,
                    dy.shape().cols(),
                    d_positions.f32s(self),
                );
            }
            LayerCall::SoftmaxStatistics { logits, targets, mut statistics, chunk } => {
                self.softmax_statistics(logits.f32s(self), targets.u32s(self), chunk, statistics.f32s(self));
            }
            LayerCall::MergeStatistics { parts, mut statistics } => {
                self.merge_statistics(parts.f32s(self), statistics.f32s(self));
            }
            LayerCall::CrossEntropyGradient { logits, targets, chunk, statistics, factors, mut gradient } => {
                let (logits, targets) = (logits.f32s(self), targets.u32s(self));
                let statistics = statistics.f32s(self);
                let factors = factors.map(|weights| weights.f32s(self));
                with_element!(gradient.dtype() => |T| {
                    let gradient = gradient.elements(self);
                    self.cross_entropy_gradient::<T>(logits, targets, chunk, statistics, factors, gradient);
                });
            }
        }
    }
}
