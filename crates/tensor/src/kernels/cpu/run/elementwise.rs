use super::Cpu;
use crate::kernels::call::ElementwiseCall;
use crate::kernels::cpu::element::with_element;
use trireme_base::Bf16;

impl Cpu {
    pub(super) fn run_elementwise(&self, call: ElementwiseCall) {
        match call {
            ElementwiseCall::Zero { mut x } => x.bytes(self).fill(0),
            ElementwiseCall::Convert { x, mut y } => {
                with_element!(x.dtype() => |X| with_element!(y.dtype() => |Y| {
                    self.convert::<X, Y>(x.elements(self), y.elements(self));
                }));
            }
            ElementwiseCall::RoundStochastically { x, seed, position, mut y } => {
                self.round_stochastically(x.f32s(self), seed, position, y.elements::<Bf16>(self));
            }
            ElementwiseCall::Stream { mut memory, traffic } => self.stream(traffic, memory.u32s(self)),
            ElementwiseCall::Copy { x, mut y } => y.bytes(self).copy_from_slice(x.bytes(self)),
            ElementwiseCall::Activate { x, mut y, activation } => with_element!(x.dtype() => |T| {
                self.activate::<T>(activation, x.elements(self), y.elements(self));
            }),
            ElementwiseCall::ActivateBackward { mut x, mut dy, activation } => {
                with_element!(x.dtype() => |T| {
                    self.activate_backward::<T>(activation, x.elements(self), dy.elements(self));
                });
            }
            ElementwiseCall::Gate { gate_up, mut y, activation } => {
                let cols = y.shape().cols();
                with_element!(y.dtype() => |T| {
                    self.gate::<T>(activation, gate_up.elements(self), y.elements(self), cols);
                });
            }
            ElementwiseCall::GateBackward { mut gate_up, mut dy, activation } => {
                let cols = dy.shape().cols();
                with_element!(dy.dtype() => |T| {
                    self.gate_backward::<T>(activation, gate_up.elements(self), dy.elements(self), cols);
                });
            }
            ElementwiseCall::Dropout { mut x, key, words, rate } => with_element!(x.dtype() => |T| {
                self.dropout::<T>(x.elements(self), key, words, rate);
            }),
            ElementwiseCall::AddAssign { mut out, term } => with_element!(term.dtype() => |T| {
                let sum = |out, term| out + term;
                self.zip_in_place::<T, T>(out.elements(self), term.elements(self), sum);
            }),
            ElementwiseCall::AddBias { x, bias, residual, mut y } => {
                let cols = x.shape().cols();
                let (bias, residual) = (self.optional_f32s(bias), self.optional_f32s(residual));
                with_element!(x.dtype() => |T| with_element!(y.dtype() => |U| {
                    self.add_bias::<T, U>(x.elements(self), bias, residual, y.elements(self), cols);
                }));
            }
        }
    }
}
