//! Kernels that are Rust functions.

use super::{Operands, Replace};
use crate::kernels::cpu::Cpu;
use crate::kernels::{Operand, OperandMut};
use std::fmt;
use std::sync::Arc;
use trireme_base::Cost;

/// A Rust function as a kernel: see [`Device::for_each_row`](crate::Device::for_each_row). Only a processor that executes this program can
/// run it.
pub(crate) struct FunctionCall {
    pub(crate) name: &'static str,
    pub(crate) cost: Cost,
    pub(crate) inputs: Vec<Operand>,
    pub(crate) output: OperandMut,
    pub(crate) function: Function,
}

pub(crate) type Function = Arc<dyn Fn(&Cpu, &[Operand], OperandMut) + Send + Sync>;

impl FunctionCall {
    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    pub(crate) fn cost(&self) -> Cost {
        self.cost
    }
}

impl Operands for FunctionCall {
    fn with_operands(&self, replace: &mut Replace<'_>) -> Self {
        FunctionCall {
            name: self.name,
            cost: self.cost,
            inputs: self.inputs.with_operands(replace),
            output: self.output.with_operands(replace),
            function: Arc::clone(&self.function),
        }
    }
}

impl fmt::Debug for FunctionCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FunctionCall { name, cost, inputs, output, .. } = self;
        f.debug_struct(name)
            .field("cost", cost)
            .field("inputs", inputs)
            .field("output", output)
            .finish_non_exhaustive()
    }
}
