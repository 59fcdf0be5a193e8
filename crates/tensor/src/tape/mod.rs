//! Reverse-mode differentiation over an open set of operations.
//!
//! A tape records one unit's forward pass for one microbatch. Backward walks the record in reverse; a parameter's
//! gradient goes to the [`GradSink`] at the moment it is complete, and each saved value is given back as soon as
//! nothing needs it. Each [`Operation`]'s backward has an input half and a weight half. They run one after the other
//! ([`Tape::backward`]), or all input halves before all weight halves ([`Tape::backward_input`], [`Tape::backward_weight`]), with
//! the same bits.
//!
//! Several operations may read a value; their gradients are added in the reverse order of the record. The tape counts who
//! still reads a value, so an operation computes in the memory of another value only where nobody reads that again.

mod axis;
mod axis_ops;
mod backward;
mod context;
mod context_axis;
mod expert_axis;
mod forward;
mod operation;
mod operations;
mod pass_axes;
mod pass_state;
#[cfg(test)]
mod tests;
mod value;

pub use axis_ops::{AloneOnAxis, AxisOps, ExchangedRuns, NotedExchanges, PendingExchange, Runs};
pub use backward::{add_to_grad, write_grad};
pub use expert_axis::{ExpertAxis, ShadowedExperts};
pub use forward::Recorder;
pub(crate) use operation::declares;
pub use operation::{
    BackwardContext, ForwardContext, GradSink, GradTarget, Op, Operand, Operation, OperationContext, ReadBy,
};
pub use operations::*;
pub use pass_axes::{ContextAxis, PassAxes, Sharding, TensorAxis};
pub use pass_state::{PassState, Randomness};
pub use value::{Argument, Arguments, Var, VarId};

use crate::device::{Device, Result};
use crate::precision::Precision;
use crate::tensor::Tensor;
use std::ops::Range;
use trireme_base::{Category, DType};
use value::Value;

/// Whether a tape saves what backward needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recording {
    /// Forward will be followed by backward.
    On,
    /// Forward only: evaluation and generation.
    Off,
}

/// The record of one unit's forward pass. Methods fail if there is no memory for what they return or compute.
#[derive(Debug)]
pub struct Tape {
    device: Device,
    recording: Recording,
    pass: PassState,
    /// Rows on their way between ranks with different experts, which one operation has started and a later one takes.
    rows_in_flight: Option<PendingExchange>,
    values: Vec<Value>,
    nodes: Vec<Node>,
    /// The inputs of all nodes.
    arguments: Vec<Argument>,
    /// What nodes have saved in forward for backward, then what input halves have kept for weight halves. Empty after its
    /// last use.
    tensors: Vec<Option<Tensor>>,
    /// Inputs that have the gradient of the output of the node whose backward runs.
    passing: Vec<usize>,
    loss: Option<PendingMean>,
    metrics: Vec<Metric>,
}

/// A mean over rows whose sum is on the device: it is there when the kernels that add it up have run.
#[derive(Debug)]
pub struct PendingMean {
    /// Sum of the values of all rows, one f64.
    pub sum: Tensor,
    /// The rows.
    pub num_rows: usize,
}

impl PendingMean {
    /// Waits for the sum, which is zero on a device that only counts.
    pub fn read(&self, device: &Device) -> RowMean {
        let mut sum = [0.0];
        device.download(self.sum.view(), &mut sum);
        RowMean { sum: sum[0], num_rows: self.num_rows }
    }
}

/// A mean over rows, such as tokens: `sum / num_rows`.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct RowMean {
    /// Sum of the values of all rows.
    pub sum: f64,
    /// The rows.
    pub num_rows: usize,
}

/// What is reported of a microbatch and has no gradient.
#[derive(Debug)]
pub struct Metric {
    /// Its name in the metrics of the run.
    pub name: &'static str,
    /// Its value.
    pub mean: PendingMean,
}

/// An operation that was recorded. Its ranges are of the tape's lists.
#[derive(Debug)]
struct Node {
    op: Op,
    inputs: Range<usize>,
    /// Values.
    outputs: Range<usize>,
    /// Tensors, saved by forward.
    saved: Range<usize>,
    /// Tensors, kept by the input half of backward.
    kept: Range<usize>,
    /// Of its term of the loss, if it has one.
    loss_weight: f32,
}

impl Tape {
    /// An empty tape for a pass.
    ///
    /// # Panics
    /// If `pass.fp8` is set and `pass.precision` is not bf16, in which fp8 is emulated.
    pub fn new(device: &Device, recording: Recording, pass: impl Into<PassState>) -> Self {
        Tape {
            device: device.clone(),
            recording,
            pass: checked(pass.into()),
            rows_in_flight: None,
            values: Vec::new(),
            nodes: Vec::new(),
            arguments: Vec::new(),
            tensors: Vec::new(),
            passing: Vec::new(),
            loss: None,
            metrics: Vec::new(),
        }
    }

    /// Clears the tape and prepares it for another pass. It keeps its capacity.
    /// Panics as [`new`](Tape::new).
    pub fn for_pass(mut self, pass: PassState) -> Self {
        self.clear();
        self.pass = checked(pass);
        self
    }

    /// Forgets all values, nodes and saved tensors, but keeps their capacity, so that a reused tape allocates nothing, and the state of the pass.
    pub fn clear(&mut self) {
        self.values.clear();
        self.nodes.clear();
        self.arguments.clear();
        self.tensors.clear();
        self.passing.clear();
        self.rows_in_flight = None;
        self.loss = None;
        self.metrics.clear();
    }

    /// Puts a value on the tape that [has a gradient](Tape::take_grad) after backward, unless it is of whole numbers.
    pub fn input(&mut self, tensor: Tensor) -> Var {
        let (requires_grad, sharding) = (tensor.dtype().is_float(), self.sharding_of_input(&tensor));
        self.push(Value { sharding, ..Value::input(tensor, requires_grad) })
    }

    /// Puts a value on the tape without a gradient, such as tokens.
    pub fn constant(&mut self, tensor: Tensor) -> Var {
        self.push(Value::input(tensor, false))
    }

    fn push(&mut self, value: Value) -> Var {
        self.values.push(value);
        Var(self.values.len() - 1)
    }

    /// Takes a value off the tape, which is not used again.
    ///
    /// # Panics
    /// If it was taken before.
    pub fn take_value(&mut self, place: VarId) -> Tensor {
        self.values[place.0].tensor.take().expect("values live until their last use")
    }

    /// Takes the unit's output off the tape: a copy if backward reads it, or if it was put on the tape from outside and may be taken
    /// off once more.
    ///
    /// # Panics
    /// If it was taken before.
    pub fn take_output(&mut self, output: &Var) -> Result<Tensor> {
        match &self.values[output.0] {
            Value { num_reads: 0, is_input: false, .. } => Ok(self.take_value(output.id())),
            value => copy(&self.device, value.tensor()),
        }
    }

    /// Puts a value back that was [taken](Tape::take_value).
    ///
    /// # Panics
    /// If it is there.
    pub fn put_value(&mut self, place: VarId, tensor: Tensor) {
        let present = self.values[place.0].tensor.replace(tensor);
        assert!(present.is_none(), "only a value that was taken is put back");
    }

    /// Whether backward gives a value a gradient.
    pub fn requires_grad(&self, place: VarId) -> bool {
        self.values[place.0].requires_grad
    }

    /// Takes the gradient of a value in the type of the value; zeros if backward gave it none.
    pub fn take_grad_or_zeros(&mut self, place: VarId) -> Result<Tensor> {
        let Value { shape, dtype, .. } = self.values[place.0];
        match self.take_grad(place) {
            Some(grad) => cast(&self.device, grad, dtype),
            None => self.device.zeros(shape, dtype, Category::Activations),
        }
    }

    /// Takes the gradient of a value, if backward gave it one.
    pub fn take_grad(&mut self, place: VarId) -> Option<Tensor> {
        self.values[place.0].grad.take()
    }

    /// The loss, if there are terms. It is known after forward if the tape does not record, and after backward if it does. `num_rows` is
    /// that of the first term.
    pub fn loss(&self) -> Option<&PendingMean> {
        self.loss.as_ref()
    }

    /// The [metrics](Recorder::apply_metric), each name once.
    pub fn metrics(&self) -> &[Metric] {
        &self.metrics
    }

    /// Shows `visit` all memory that the tape holds: what backward reads. To move it elsewhere for a while.
    pub fn for_each_memory(&mut self, visit: impl FnMut(&mut Tensor)) {
        let values = self.values.iter_mut().filter_map(|value| value.tensor.as_mut());
        values.chain(self.tensors.iter_mut().flatten()).for_each(visit);
    }

    /// Gives back what is quickly computed again from the rest: the outputs of
    /// [recomputable](Operation::is_recomputable) operations. Backward needs [`recompute`](Tape::recompute) first.
    pub fn keep_products(&mut self) {
        let recomputable = self.values.iter_mut().filter(|value| value.is_recomputable);
        recomputable.for_each(|value| value.tensor = None);
    }
}

fn checked(pass: PassState) -> PassState {
    assert!(pass.fp8.is_none() || pass.precision == Precision::Bf16, "fp8 is emulated in bf16");
    pass
}

/// The same elements as `dtype`: the tensor itself, if they are so already.
fn cast(device: &Device, tensor: Tensor, dtype: DType) -> Result<Tensor> {
    if tensor.dtype() == dtype {
        return Ok(tensor);
    }
    let mut converted = device.empty(tensor.shape(), dtype, Category::Activations)?;
    device.convert(tensor.view(), converted.view_mut());
    Ok(converted)
}

/// A tensor of its own with the same elements.
fn copy(device: &Device, tensor: &Tensor) -> Result<Tensor> {
    let mut copy = device.empty(tensor.shape(), tensor.dtype(), Category::Activations)?;
    device.copy(tensor.view(), copy.view_mut());
    Ok(copy)
}
