//! The CPU as a backend: runs kernel calls.

mod attention;
mod blocks;
mod elementwise;
mod experts;
mod grouped;
mod layers;
mod matmul;
mod optimizer;
mod quantized;
mod sums;

use super::Cpu;
use crate::kernels::Operand;
use crate::kernels::call::{Call, FunctionCall};

impl Cpu {
    /// Runs a kernel to its end.
    ///
    /// # Panics
    /// If operands do not fit each other.
    pub(crate) fn run(&self, call: Call) {
        match call {
            Call::Attention(call) => self.run_attention(call),
            Call::Block(call) => self.run_block(call),
            Call::Elementwise(call) => self.run_elementwise(call),
            Call::Expert(call) => self.run_expert(call),
            Call::Function(FunctionCall { inputs, output, function, .. }) => function(self, &inputs, output),
            Call::Grouped(call) => self.run_grouped(call),
            Call::Layer(call) => self.run_layer(call),
            Call::Matmul(call) => self.run_matmul(call),
            Call::Optimizer(call) => self.run_optimizer(call),
            Call::Quantized(call) => self.run_quantized(call),
            Call::Sum(call) => self.run_sum(call),
        }
    }

    /// The f32 elements of an operand that may be absent.
    fn optional_f32s(&self, operand: Option<Operand>) -> Option<&[f32]> {
        operand.map(|operand| operand.f32s(self))
    }
}
