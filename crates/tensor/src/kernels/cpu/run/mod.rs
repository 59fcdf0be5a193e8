//! The CPU as a backend: runs kernel calls.

mod attention;
mod blocks;
mod elementwise;
mod experts;
mod expression;
mod grouped;
mod layers;
mod matmul;
mod optimizer;
mod quantized;
mod sums;

use super::Cpu;
use crate::kernels::backend::{Backend, HostCopy};
use crate::kernels::call::{Call, FunctionCall};
use crate::kernels::{Operand, OperandMut};
use std::panic::Location;
use trireme_base::Event;

/// Every method completes its work before it returns.
impl Backend for Cpu {
    fn as_cpu(&self) -> Option<&Cpu> {
        Some(self)
    }

    fn run(&self, call: Call) {
        match call {
            Call::Attention(call) => self.run_attention(call),
            Call::Block(call) => self.run_block(call),
            Call::Elementwise(call) => self.run_elementwise(call),
            Call::Expert(call) => self.run_expert(call),
            Call::Expression(call) => self.run_expression(call),
            Call::Function(FunctionCall { inputs, output, function, .. }) => function(self, &inputs, output),
            Call::Grouped(call) => self.run_grouped(call),
            Call::Layer(call) => self.run_layer(call),
            Call::Matmul(call) => self.run_matmul(call),
            Call::Optimizer(call) => self.run_optimizer(call),
            Call::Quantized(call) => self.run_quantized(call),
            Call::Sum(call) => self.run_sum(call),
        }
    }

    fn upload(&self, from: &[u8], mut to: OperandMut) {
        to.bytes(self).copy_from_slice(from);
    }

    fn download(&self, from: Operand, to: &mut [u8]) -> Result<(), String> {
        to.copy_from_slice(from.bytes(self));
        Ok(())
    }

    fn copy(&self, HostCopy { mut device, mut host, after }: HostCopy) -> Event {
        after.wait();
        device.copy(self, host.bytes());
        host.return_to_owner();
        Event::DONE
    }

    fn record(&self) -> Event {
        Event::DONE
    }

    fn wait_for(&self, event: &Event, _caller: &'static Location<'static>) {
        event.wait();
    }
}

impl Cpu {
    /// Returns the f32 elements of an optional operand.
    fn optional_f32s(&self, operand: Option<Operand>) -> Option<&[f32]> {
        operand.map(|operand| operand.f32s(self))
    }
}
