//! Values of which ranks have parts of the positions: context parallelism.
//!
//! Dim 1 of values is that of positions, and floats have at least one more, except data that has a number for each position. What operations make of one position depends on no other one, except in attention, which takes
//! in the keys of all ranks ([`Attention`](super::Attention)). To everything outside of units, these ranks are data-parallel: they have the
//! same parameters, and their gradients are summed.

use super::value::Value;
use super::{Argument, ContextAxis, Op, Operand, Operation, OperationContext, Recorder, Tape, Var};
use crate::device::{DeviceError, Result};
use smallvec::SmallVec;
use std::ops::Range;
use trireme_base::{AxisPlace, ContextPlace, Positions};

/// Dims of a value with positions: of the samples, of the positions, and of what there is of each.
const DIMS_MIN: usize = 3;

impl OperationContext<'_> {
    /// The context axis, if it has several ranks.
    pub fn context(&self) -> Option<&ContextAxis> {
        self.tape.pass.axes.context.as_ref()
    }

    /// Which of the ranks of the context axis this is.
    pub fn context_place(&self) -> ContextPlace {
        self.context().map_or(ContextPlace::ALONE, ContextAxis::place)
    }

    /// The positions of sequences of which this rank has `len`.
    pub fn positions(&self, len: usize) -> Positions {
        match self.context_place() {
            ContextPlace::ALONE => Positions::run(self.tape.pass.first_position, len),
            place => place.positions(len * place.degree()),
        }
    }

    /// The positions of sequences of which this rank has `len` for its heads.
    pub fn positions_of_heads(&self, len: usize) -> Positions {
        match self.context_place() {
            place if place.ring == AxisPlace::ALONE => Positions::run(self.tape.pass.first_position, len),
            place => place.positions_of_heads(len * place.ring.degree),
        }
    }
}

impl Recorder<'_> {
    /// Exchanges positions of inputs for heads, where the operation wants that. The inputs are the arguments from `first` on;
    /// returns where they begin afterwards. Fails if the operation is wrong where ranks have parts of the positions, or an
    /// exchange fails.
    pub(super) fn exchange_for_heads(&mut self, op: &dyn Operation, first: usize) -> Result<usize> {
        let Some(axis) = &self.tape.pass.axes.context else { return Ok(first) };
        let inputs = self.tape.arguments[first..].iter().map(|argument| &self.tape.values[argument.value]);
        // Dim 1 of fewer dims could be the last one, over which operations work; but not where data has a number for each position.
        let is_data = |value: &Value| value.is_input && !value.requires_grad;
        let has_dims = (inputs.filter(|value| value.dtype.is_float()))
            .all(|value| value.shape.dims().len() >= DIMS_MIN || is_data(value));
        if !op.takes_positions() || !has_dims {
            return Err(DeviceError::NeedsAllPositions { operation: format!("{op:?}") });
        }
        if axis.heads.is_none() || op.head_exchange(Operand::Output, 1).is_none() {
            return Ok(first);
        }
        let mut arguments: SmallVec<[Argument; 4]> = self.tape.arguments.drain(first..).collect();
        let is_float = |tape: &Tape, argument: &Argument| tape.values[argument.value].dtype.is_float();
        let num_floats = arguments.iter().filter(|argument| is_float(self.tape, argument)).count();
        for (place, argument) in arguments.iter_mut().enumerate() {
            let exchange = op.head_exchange(Operand::Input(place), num_floats);
            if let Some(exchange) = exchange.filter(|_| is_float(self.tape, argument)) {
                let Argument { value, is_last } = *argument;
                *argument = self.apply(exchange, [Argument { value, is_last }])?.into();
            }
        }
        let first = self.tape.arguments.len();
        self.tape.arguments.extend(arguments);
        Ok(first)
    }

    /// Exchanges heads of the only output for positions, where inputs were exchanged; the outputs.
    pub(super) fn exchange_for_positions(&mut self, op: &Op, outputs: Range<usize>) -> Result<Range<usize>> {
        let has_heads = self.tape.pass.axes.context.as_ref().is_some_and(|axis| axis.heads.is_some());
        let Some(exchange) = op.get().head_exchange(Operand::Output, 1).filter(|_| has_heads) else {
            return Ok(outputs);
        };
        assert_eq!(outputs.len(), 1, "{op:?} exchanges one output");
        let Var(output) = self.apply(exchange, [Var(outputs.start)])?;
        Ok(output..output + 1)
    }
}
