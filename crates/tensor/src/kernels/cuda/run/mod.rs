//! Runs kernel calls on a GPU.

mod attention;
mod blocks;
mod elementwise;
mod experts;
mod expression;
mod grouped;
mod layers;
mod optimizer;
mod quantized;
mod sums;

pub(crate) use attention::attention_scratch;

use super::Cuda;
use crate::kernels::call::Call;

impl Cuda {
    /// Launches the kernels of a call.
    pub(super) fn run_call(&self, call: &Call) {
        match call {
            Call::Attention(call) => self.run_attention(call),
            Call::Block(call) => self.run_block(call),
            Call::Elementwise(call) => self.run_elementwise(call),
            Call::Expert(call) => self.run_expert(call),
            Call::Expression(call) => self.run_expression(call),
            Call::Function(call) => unreachable!("the device refuses the Rust function of {}", call.name()),
            Call::Grouped(call) => self.run_grouped(call),
            Call::Layer(call) => self.run_layer(call),
            Call::Matmul(call) => self.run_matmul(call),
            Call::Optimizer(call) => self.run_optimizer(call),
            Call::Quantized(call) => self.run_quantized(call),
            Call::Sum(call) => self.run_sum(call),
        }
    }
}
