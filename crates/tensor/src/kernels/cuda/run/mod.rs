//! Runs kernel calls on a GPU.

mod attention;
mod blocks;
mod elementwise;
mod layers;
mod optimizer;
mod sums;

pub(crate) use attention::attention_scratch;

use super::Cuda;
use crate::kernels::call::Call;

impl Cuda {
    /// Launches the kernels of a call. Returns false if there is none for it.
    pub(super) fn run_on_device(&self, call: &Call) -> bool {
        match call {
            Call::Attention(call) => return self.run_attention(call),
            Call::Block(call) => self.run_block(call),
            Call::Elementwise(call) => self.run_elementwise(call),
            Call::Layer(call) => self.run_layer(call),
            Call::Matmul(call) => self.run_matmul(call),
            Call::Optimizer(call) => self.run_optimizer(call),
            Call::Sum(call) => self.run_sum(call),
            _ => return false,
        }
        true
    }
}
