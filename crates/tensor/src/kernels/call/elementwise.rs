//! Elementwise kernels.

use super::{each, kernel_calls, num_bytes};
use crate::kernels::cpu::dropout::WordRows;
use crate::kernels::{Activation, Operand, OperandMut};
use trireme_base::{Cost, RandomKey};

kernel_calls! {
    /// Elementwise kernels. Kernels that write `x` or `dy` work in place.
    ElementwiseCall {
        "zero" => Zero { x: OperandMut }
        "convert" => Convert { x: Operand, y: OperandMut }
        "copy" => Copy { x: Operand, y: OperandMut }
        "activate" => Activate { x: Operand, y: OperandMut; activation: Activation }
        "activate_backward" => ActivateBackward { x: OperandMut, dy: OperandMut; activation: Activation }
        "gate" => Gate { gate_up: Operand, y: OperandMut; activation: Activation }
        "gate_backward" => GateBackward { gate_up: OperandMut, dy: OperandMut; activation: Activation }
        "dropout" => Dropout { x: OperandMut; key: RandomKey, words: WordRows, rate: f32 }
        "add_assign" => AddAssign { out: OperandMut, term: Operand }
        "add_bias" => AddBias { x: Operand, bias: Option<Operand>, residual: Option<Operand>, y: OperandMut }
    }
}

/// Operations of the derivative of an activation and its products, in addition to the operations of the activation.
const DERIVATIVE_OPERATIONS: usize = 8;

impl ElementwiseCall {
    pub(crate) fn cost(&self) -> Cost {
        match self {
            Self::Zero { x } => Cost::ZERO.writes(x.num_bytes()),
            Self::Convert { x, y } | Self::Copy { x, y } => {
                Cost::ZERO.reads(x.num_bytes()).writes(y.num_bytes())
            }
            Self::Activate { x, y, activation } => {
                each(x.shape(), activation.num_operations()).reads(x.num_bytes()).writes(y.num_bytes())
            }
            Self::ActivateBackward { x, dy, activation } => {
                let num_operations = activation.num_operations() + DERIVATIVE_OPERATIONS;
                each(x.shape(), num_operations).updates(x.num_bytes()).updates(dy.num_bytes())
            }
            Self::Gate { gate_up, y, activation } => {
                let cost = each(y.shape(), activation.num_operations() + 1);
                cost.reads(gate_up.num_bytes()).writes(y.num_bytes())
            }
            Self::GateBackward { gate_up, dy, activation } => {
                let num_operations = activation.num_operations() + DERIVATIVE_OPERATIONS;
                each(dy.shape(), num_operations).updates(gate_up.num_bytes()).updates(dy.num_bytes())
            }
            Self::Dropout { x, .. } => each(x.shape(), 1).updates(x.num_bytes()),
            Self::AddAssign { out, term } => {
                each(term.shape(), 1).reads(term.num_bytes()).updates(out.num_bytes())
            }
            Self::AddBias { x, bias, residual, y } => {
                let num_terms = usize::from(bias.is_some()) + usize::from(residual.is_some());
                each(x.shape(), num_terms).reads(x.num_bytes() + num_bytes(residual)).writes(y.num_bytes())
            }
        }
    }
}
