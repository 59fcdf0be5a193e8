//! Context parallelism: values whose positions are sharded over ranks.
//!
//! Dim 1 of a value is its positions. Float values have at least one more dim, except data with one number per position. Operations compute
//! each position independently of the others, except attention, which communicates the keys of all ranks ([`Attention`](super::Attention)).
//!
//! Outside of units, these ranks are data-parallel: they have the same parameters, and their gradients are summed. `RankGrid` (crate
//! `parallel`) counts them among the replicas or, if state is sharded, among the shards, so reductions, ZeRO, optimizers and checkpoints
//! have no case for them.
//!
//! A batch is uploaded with this rank's positions only (`HostBatch::upload_positions`): at most two runs of consecutive positions, in
//! ascending order. The keys of one rank that a query sees, within its window and document, are therefore one range of that rank's keys
//! ([`Positions::num_before`]). Kernels do not depend on ranks: `Device::attention_block` adds the keys of one rank to the result for
//! earlier keys, and `RingAttention` calls it for each rank in turn. `ExchangeHeads` is a separate operation, which the tape inserts around
//! operations that need heads ([`Operation::head_exchange`]).

use super::value::Value;
use super::{Argument, ContextAxis, InputOrOutput, Op, Operation, OperationContext, Recorder, Tape, Var};
use crate::device::{DeviceError, Result};
use smallvec::SmallVec;
use std::ops::Range;
use trireme_base::{AxisRank, ContextRank, Positions};

/// Minimum number of dims of a float value with positions: samples, positions and columns.
const DIMS_MIN: usize = 3;

impl OperationContext<'_> {
    /// Returns the context axis; `None` if it has one rank.
    pub fn context_axis(&self) -> Option<&ContextAxis> {
        self.tape.pass.axes.context.as_ref()
    }

    /// Returns this rank's place on the context axis.
    pub fn context_rank(&self) -> ContextRank {
        self.context_axis().map_or(ContextRank::ALONE, ContextAxis::context_rank)
    }

    /// Returns the positions that this rank holds of each sequence, given their number `len`.
    pub fn positions(&self, len: usize) -> Positions {
        match self.context_rank() {
            ContextRank::ALONE => Positions::run(self.tape.pass.first_position, len),
            place => place.positions(len * place.degree()),
        }
    }

    /// Returns the positions of each sequence that this rank holds for its heads, after positions were exchanged for heads, given their
    /// number `len`.
    pub fn positions_after_head_exchange(&self, len: usize) -> Positions {
        match self.context_rank() {
            place if place.ring == AxisRank::ALONE => Positions::run(self.tape.pass.first_position, len),
            place => place.ring_positions(len * place.ring.degree),
        }
    }
}

impl Recorder<'_> {
    /// Inserts the operations that exchange the positions of the inputs for heads, if `op` needs them. The inputs are the arguments from
    /// `first` on. Returns the index of the first exchanged argument. Fails if the operation is not correct for sharded positions, or if an
    /// exchange fails.
    pub(super) fn exchange_for_heads(&mut self, op: &dyn Operation, first: usize) -> Result<usize> {
        let Some(axis) = &self.tape.pass.axes.context else { return Ok(first) };
        let inputs = self.tape.arguments[first..].iter().map(|argument| &self.tape.values[argument.value]);
        // With fewer dims, dim 1 could be the last one, over which operations compute. Data with one number per position is an exception.
        let is_data = |value: &Value| value.is_input && !value.requires_grad;
        let has_dims = (inputs.filter(|value| value.dtype.is_float()))
            .all(|value| value.shape.dims().len() >= DIMS_MIN || is_data(value));
        if !op.accepts_sharded_positions() || !has_dims {
            return Err(DeviceError::NeedsAllPositions { operation: format!("{op:?}") });
        }
        if axis.heads.is_none() || op.head_exchange(InputOrOutput::Output, 1).is_none() {
            return Ok(first);
        }
        let mut arguments: SmallVec<[Argument; 4]> = self.tape.arguments.drain(first..).collect();
        let is_float = |tape: &Tape, argument: &Argument| tape.values[argument.value].dtype.is_float();
        let num_floats = arguments.iter().filter(|argument| is_float(self.tape, argument)).count();
        for (place, argument) in arguments.iter_mut().enumerate() {
            let exchange = op.head_exchange(InputOrOutput::Input(place), num_floats);
            if let Some(exchange) = exchange.filter(|_| is_float(self.tape, argument)) {
                let Argument { value, is_last } = *argument;
                *argument = self.apply(exchange, [Argument { value, is_last }])?.into();
            }
        }
        let first = self.tape.arguments.len();
        self.tape.arguments.extend(arguments);
        Ok(first)
    }

    /// Inserts the operation that exchanges the heads of the only output for positions, if `op` needs it. Returns the indices of the
    /// outputs.
    pub(super) fn exchange_for_positions(&mut self, op: &Op, outputs: Range<usize>) -> Result<Range<usize>> {
        let has_heads = self.tape.pass.axes.context.as_ref().is_some_and(|axis| axis.heads.is_some());
        let Some(exchange) = op.get().head_exchange(InputOrOutput::Output, 1).filter(|_| has_heads) else {
            return Ok(outputs);
        };
        assert_eq!(outputs.len(), 1, "{op:?} exchanges one output");
        let Var(output) = self.apply(exchange, [Var(outputs.start)])?;
        Ok(output..output + 1)
    }
}
