//! Tensor parallelism within a unit: sharded values and the exchanges between ranks of the tensor axis.
//!
//! Layers with sharded parameters work on shards of values. A column-parallel layer computes a shard of the outputs; a row-parallel layer
//! computes partial sums of all outputs, which are then reduced (Shoeybi et al., "Megatron-LM", 2019, section 3). With sequence
//! parallelism, values between these layers are sharded by rows, so that norms and residuals are not computed redundantly and the saved
//! activations are sharded, too (Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022, section 4.2).
//! The rows of all sequences of the microbatch are concatenated before they are sharded, so each rank's shard is contiguous in memory.
//!
//! # Shards of parameters
//! A model declares only how each parameter is split. [`ParameterTable::add`](crate::ParameterTable::add) returns the span of this rank's
//! shard, with its place in the full span ([`SpanShard`](crate::parameter_table::SpanShard)), and operations derive their communication
//! from it: [`Linear`](super::Linear) from the split dim, [`Embedding`](super::Embedding) and [`LossHead`](super::LossHead) from the range
//! of rows.
//!
//! # Shardings of values
//! The tape records the [`Sharding`] of each value. It gathers rows before an operation that does not [accept sharded
//! rows](Operation::accepts_sharded_rows), so such an operation is correct without knowledge of the axis. The tape does not reshard values
//! that are [sharded like parameters](Sharding::ByParameters). Only operations on single elements or on full heads may read them. If such
//! an operation also reads a replicated value that has a gradient, the model must apply [`CopyToRanks`](super::CopyToRanks) to the
//! replicated value first. Units pass on values that are replicated or sharded by rows.
//!
//! # Order of exchanges
//! Exchanges are part of the passes of a unit and have a process group of their own. The ranks of the axis run the same program, so they
//! start exchanges in the same order, and wait for no other ranks meanwhile: an exchange cannot be part of a cycle of waits. An operation
//! starts an exchange and finishes it later, so several may be pending. `Linear` exchanges its input, and the gradient of its input, while
//! matmuls run.

use super::{
    AllGatherRows, Argument, Op, Operation, OperationContext, PendingExchange, Recorder, Sharding, SplitRows,
    Tape, TensorAxis, Var,
};
use crate::cow_tensor::CowTensor;
use crate::device::Result;
use crate::shape::Shape;
use crate::tensor::Tensor;
use crate::view::View;
use smallvec::SmallVec;
use trireme_base::{DType, ExchangeKind};

/// A result of an exchange along the tensor axis, possibly pending.
#[derive(Debug)]
pub(super) enum PendingValue {
    /// The result itself, on a tensor axis with one rank.
    Ready(Tensor),
    /// A pending exchange, with the shape and dtype of its result.
    InFlight(PendingExchange, Shape, DType),
}

impl OperationContext<'_> {
    /// Returns the tensor axis; `None` if it has one rank.
    pub fn tensor_axis(&self) -> Option<&TensorAxis> {
        self.tape.pass.axes.tensor.as_ref()
    }

    fn expect_tensor_axis(&self) -> &TensorAxis {
        self.tensor_axis().expect("only several ranks have parts of values")
    }

    /// All-gathers the rows of a value of which this rank has the shard `part`.
    ///
    /// # Errors
    /// As [`AxisOps::start`](super::AxisOps::start), and if there is no memory for the result.
    ///
    /// # Panics
    /// If the tensor axis has one rank.
    pub fn gather_rows(&self, part: View<'_>) -> Result<Tensor> {
        let gather = self.start_gather(part)?;
        self.finish_exchange(gather)
    }

    /// Starts [`gather_rows`](OperationContext::gather_rows).
    pub(super) fn start_gather(&self, part: View<'_>) -> Result<PendingValue> {
        let axis = self.expect_tensor_axis();
        let exchange = axis.ops.start(self.device(), ExchangeKind::AllGather, part)?;
        Ok(PendingValue::InFlight(exchange, axis.full_shape(part.shape()), part.dtype()))
    }

    /// Waits for a started exchange and returns its result.
    pub(super) fn finish_exchange(&self, value: PendingValue) -> Result<Tensor> {
        match value {
            PendingValue::Ready(tensor) => Ok(tensor),
            PendingValue::InFlight(exchange, shape, dtype) => {
                let mut result = self.empty(shape, dtype)?;
                self.expect_tensor_axis().ops.finish(self.device(), exchange, result.view_mut())?;
                Ok(result)
            }
        }
    }

    /// Like [`finish_exchange`](OperationContext::finish_exchange), but the returned tensor may borrow the exchange's own memory, to avoid
    /// a copy. Drop it soon: later exchanges need that memory.
    pub(super) fn finish_temporary(&self, value: PendingValue) -> Result<Tensor> {
        match value {
            PendingValue::Ready(tensor) => Ok(tensor),
            PendingValue::InFlight(exchange, shape, dtype) => {
                self.expect_tensor_axis().ops.finish_temporary(self.device(), exchange, shape, dtype)
            }
        }
    }

    /// Returns all rows of a value with the given sharding, for a caller that drops them soon. Fails like
    /// [`gather_rows`](OperationContext::gather_rows).
    pub(super) fn all_rows<'a>(&self, values: View<'a>, sharding: Sharding) -> Result<CowTensor<'a>> {
        Ok(match sharding {
            Sharding::Rows => CowTensor::Owned(self.finish_temporary(self.start_gather(values)?)?),
            _ => CowTensor::Borrowed(values),
        })
    }

    /// Copies this rank's shard of the rows of a replicated value.
    ///
    /// # Errors
    /// [`DeviceError::IndivisibleRows`](crate::DeviceError::IndivisibleRows), or if there is no memory for the copy.
    ///
    /// # Panics
    /// If the tensor axis has one rank.
    pub fn split_rows(&self, whole: View<'_>) -> Result<Tensor> {
        let axis = self.expect_tensor_axis();
        let mut part = self.empty(axis.part_shape(whole.shape())?, whole.dtype())?;
        let first = axis.axis_rank().rank * part.shape().num_elements();
        self.device().copy(whole.part(first, part.shape()), part.view_mut());
        Ok(part)
    }

    /// Sums `term` over the ranks of the tensor axis: an all-reduce, or a reduce-scatter if the result is sharded by rows. Returns `term`
    /// itself if the axis has one rank.
    ///
    /// # Errors
    /// As [`AxisOps::start`](super::AxisOps::start), and if there is no memory for the sum.
    /// [`DeviceError::IndivisibleRows`](crate::DeviceError::IndivisibleRows) if the result cannot be sharded by rows.
    pub fn sum_over_ranks(&self, term: Tensor, sharding: Sharding) -> Result<Tensor> {
        let sum = self.start_sum(term, sharding)?;
        self.finish_exchange(sum)
    }

    /// Starts [`sum_over_ranks`](OperationContext::sum_over_ranks).
    pub(super) fn start_sum(&self, term: Tensor, sharding: Sharding) -> Result<PendingValue> {
        let Some(axis) = self.tensor_axis() else { return Ok(PendingValue::Ready(term)) };
        let (kind, shape) = match sharding {
            Sharding::Rows => (ExchangeKind::ReduceScatter, axis.part_shape(term.shape())?),
            _ => (ExchangeKind::AllReduce, term.shape()),
        };
        let dtype = term.dtype();
        let exchange = axis.ops.start_sum(self.device(), kind, term)?;
        Ok(PendingValue::InFlight(exchange, shape, dtype))
    }

    /// Allocates memory for a partial sum that [`start_sum`](OperationContext::start_sum) will reduce, with unspecified contents.
    pub(super) fn empty_partial_sum(&self, shape: Shape, dtype: DType) -> Result<Tensor> {
        match self.tensor_axis() {
            Some(axis) => axis.ops.empty_partial_sum(self.device(), shape, dtype),
            None => self.empty(shape, dtype),
        }
    }
}

impl Recorder<'_> {
    /// Inserts the gathers and splits that an operation needs: gathers inputs that are sharded by rows if the operation needs all rows, and
    /// splits replicated inputs if the operation works on rows. The inputs are the arguments from `first` on. Returns the index of the
    /// first adapted argument.
    pub(super) fn reshard_inputs(&mut self, op: &dyn Operation, first: usize) -> Result<usize> {
        let Some(axis) = &self.tape.pass.axes.tensor else { return Ok(first) };
        let of = |tape: &Tape, argument: &Argument| tape.values[argument.value].sharding;
        let mut arguments: SmallVec<[Argument; 4]> = self.tape.arguments.drain(first..).collect();
        let is_in_rows =
            |(place, argument)| op.accepts_sharded_rows(place) && of(self.tape, argument) == Sharding::Rows;
        let wants_rows = match op.output_sharding(axis) {
            Some(sharding) => sharding == Sharding::Rows,
            None => arguments.iter().enumerate().any(is_in_rows),
        };
        let has_input = |sharding, has_grad: bool| {
            let mut values = arguments.iter().map(|argument| &self.tape.values[argument.value]);
            values.any(|value| value.sharding == sharding && (!has_grad || value.requires_grad))
        };
        assert!(
            op.output_sharding(axis).is_some()
                || !has_input(Sharding::ByParameters, false)
                || !has_input(Sharding::Replicated, true),
            "{op:?} reads a value that is cut, and one that is not, whose gradient would be a part of a sum: CopyToRanks comes first"
        );
        for (place, argument) in arguments.iter_mut().enumerate() {
            let change: Op = match (of(self.tape, argument), op.accepts_sharded_rows(place)) {
                (Sharding::Rows, false) => (&AllGatherRows).into(),
                (Sharding::Replicated, true) if wants_rows => (&SplitRows).into(),
                _ => continue,
            };
            let Argument { value, is_last } = *argument;
            *argument = self.apply(change, [Argument { value, is_last }])?.into();
        }
        let first = self.tape.arguments.len();
        self.tape.arguments.extend(arguments);
        Ok(first)
    }

    /// Gathers the rows of a value once for several operations that need all rows. Otherwise, each of them would gather.
    ///
    /// # Errors
    /// As [`apply`](Recorder::apply).
    pub fn all_rows(&mut self, value: Var) -> Result<Var> {
        match self.tape.values[value.0].sharding {
            Sharding::Rows => self.apply(&AllGatherRows, [value]),
            _ => Ok(value),
        }
    }

    /// Converts a value to the sharding in which values pass between units.
    ///
    /// # Errors
    /// As [`apply`](Recorder::apply).
    ///
    /// # Panics
    /// If the value is sharded like the parameters ([`Sharding::ByParameters`]).
    pub fn reshard_between_units(&mut self, value: Var) -> Result<Var> {
        let Some(axis) = &self.tape.pass.axes.tensor else { return Ok(value) };
        let found = &self.tape.values[value.0];
        match (found.sharding, axis.sharding_between_units(found.shape, found.dtype)) {
            (Sharding::ByParameters, _) => panic!(
                "a unit passes on what ranks have only parts of; a layer that is cut by its inputs comes first"
            ),
            (Sharding::Replicated, Sharding::Rows) => self.apply(&SplitRows, [value]),
            (Sharding::Rows, Sharding::Replicated) => self.apply(&AllGatherRows, [value]),
            _ => Ok(value),
        }
    }
}

impl Tape {
    /// Returns the sharding of a value that comes from another unit.
    pub(super) fn sharding_of_input(&self, tensor: &Tensor) -> Sharding {
        let axis = self.pass.axes.tensor.as_ref();
        axis.map_or(Sharding::Replicated, |axis| axis.sharding_between_units(tensor.shape(), tensor.dtype()))
    }

    /// Returns the sharding of the outputs of an operation.
    pub(super) fn output_sharding(&self, op: &dyn Operation, inputs: &[Argument]) -> Sharding {
        let Some(axis) = &self.pass.axes.tensor else { return Sharding::Replicated };
        op.output_sharding(axis).unwrap_or_else(|| {
            let all = || inputs.iter().map(|argument| self.values[argument.value].sharding);
            let is = |sharding| all().any(|found| found == sharding);
            match (is(Sharding::ByParameters), is(Sharding::Rows)) {
                (true, _) => Sharding::ByParameters,
                (false, true) => Sharding::Rows,
                (false, false) => Sharding::Replicated,
            }
        })
    }
}
