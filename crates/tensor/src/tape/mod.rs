//! Reverse-mode automatic differentiation over an open set of operations.
//!
//! A tape records one unit's forward pass for one microbatch. Backward visits the recorded operations in reverse order. It passes each
//! parameter gradient to the [`GradSink`] as soon as it is complete, and frees each saved value after its last use. The backward of an
//! [`Operation`] has an input half and a weight half. The halves run one after the other ([`Tape::backward`]), or all input halves run
//! before all weight halves ([`Tape::backward_input`], [`Tape::backward_weight`]), with the same bits.
//!
//! If several operations read a value, their gradients are added in the reverse order of the record. The tape counts the pending readers of
//! a value, and an operation computes in place only if no other reader is pending.

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

pub use axis_ops::{AxisOps, DryRunAxis, ExchangeLog, ExchangedRuns, PendingExchange, Runs};
pub use backward::{add_to_grad, write_grad};
pub use expert_axis::{ExpertAxis, ShadowedExperts};
pub use forward::Recorder;
pub(crate) use operation::declares;
pub use operation::{
    BackwardContext, ForwardContext, GradSink, GradTarget, InputOrOutput, Op, Operation, OperationContext,
    ReadBy,
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

/// The recording mode of a tape: whether it saves the values that backward needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Recording {
    /// Backward will follow forward.
    On,
    /// Forward only, for evaluation and generation.
    Off,
}

/// The record of one unit's forward pass for one microbatch. Methods fail if the device has no memory for their results.
#[derive(Debug)]
pub struct Tape {
    device: Device,
    recording: Recording,
    pass: PassState,
    /// A pending exchange of rows between expert-parallel ranks, which one operation has started and a later one will finish.
    rows_in_flight: Option<PendingExchange>,
    values: Vec<Value>,
    nodes: Vec<Node>,
    /// The inputs of all nodes.
    arguments: Vec<Argument>,
    /// Tensors that nodes saved in forward for backward, followed by those that input halves kept for weight halves. `None` after the
    /// last use.
    tensors: Vec<Option<Tensor>>,
    /// Inputs that receive the output gradient of the running backward node unchanged.
    passed_through: Vec<usize>,
    loss: Option<PendingMean>,
    metrics: Vec<Metric>,
}

/// A mean over rows whose sum is still on the device.
#[derive(Debug)]
pub struct PendingMean {
    /// Sum of the values of all rows, one f64.
    pub sum: Tensor,
    /// Number of rows.
    pub num_rows: usize,
}

impl PendingMean {
    /// Waits for the sum and downloads it; 0 on a counting device.
    ///
    /// # Errors
    /// If the device has failed.
    pub fn read(&self, device: &Device) -> Result<RowMean> {
        let mut sum = [0.0];
        device.download(self.sum.view(), &mut sum)?;
        Ok(RowMean { sum: sum[0], num_rows: self.num_rows })
    }
}

/// A mean over rows, such as tokens: `sum / num_rows`.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct RowMean {
    /// Sum of the values of all rows.
    pub sum: f64,
    /// Number of rows.
    pub num_rows: usize,
}

/// A value that is reported per microbatch and has no gradient.
#[derive(Debug)]
pub struct Metric {
    /// Name in the metrics of the run.
    pub name: &'static str,
    /// Mean over the rows of the microbatch.
    pub mean: PendingMean,
}

/// A recorded operation. Its ranges index lists of the tape.
#[derive(Debug)]
struct Node {
    op: Op,
    inputs: Range<usize>,
    /// Indices of values.
    outputs: Range<usize>,
    /// Indices of tensors that forward saved.
    saved: Range<usize>,
    /// Indices of tensors that the input half of backward kept.
    kept: Range<usize>,
    /// Weight of the operation's loss term, if it has one.
    loss_weight: f32,
}

impl Tape {
    /// Creates an empty tape for a pass.
    ///
    /// # Panics
    /// If `pass.fp8` is set and `pass.precision` is not bf16.
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
            passed_through: Vec::new(),
            loss: None,
            metrics: Vec::new(),
        }
    }

    /// Clears the tape for another pass. Keeps its capacity. Panics in the cases of [`new`](Tape::new).
    pub fn for_pass(mut self, pass: PassState) -> Self {
        self.clear();
        self.pass = checked(pass);
        self
    }

    /// Removes all values, nodes and saved tensors. Keeps the state of the pass and the lists' capacity, so that a reused tape does not
    /// allocate.
    pub fn clear(&mut self) {
        self.values.clear();
        self.nodes.clear();
        self.arguments.clear();
        self.tensors.clear();
        self.passed_through.clear();
        self.rows_in_flight = None;
        self.loss = None;
        self.metrics.clear();
    }

    /// Adds an input value to the tape. Float values [have a gradient](Tape::take_grad) after backward.
    pub fn input(&mut self, tensor: Tensor) -> Var {
        let (requires_grad, sharding) = (tensor.dtype().is_float(), self.sharding_of_input(&tensor));
        self.push(Value { sharding, ..Value::input(tensor, requires_grad) })
    }

    /// Adds an input value without a gradient, for example tokens.
    pub fn constant(&mut self, tensor: Tensor) -> Var {
        self.push(Value::input(tensor, false))
    }

    fn push(&mut self, value: Value) -> Var {
        self.values.push(value);
        Var(self.values.len() - 1)
    }

    /// Removes a value from the tape. It must not be read afterwards.
    ///
    /// # Panics
    /// If it was already taken.
    pub fn take_value(&mut self, id: VarId) -> Tensor {
        self.values[id.0].tensor.take().expect("values live until their last use")
    }

    /// Takes the unit's output from the tape. Copies it if backward reads it, or if it is an input of the tape, which may be taken again.
    ///
    /// # Errors
    /// If there is no memory for a copy.
    ///
    /// # Panics
    /// If it was already taken.
    pub fn take_output(&mut self, output: &Var) -> Result<Tensor> {
        match &self.values[output.0] {
            Value { num_reads: 0, is_input: false, .. } => Ok(self.take_value(output.id())),
            value => copy(&self.device, value.tensor()),
        }
    }

    /// Puts back a value that was [taken](Tape::take_value).
    ///
    /// # Panics
    /// If the tape still has the value.
    pub fn put_value(&mut self, id: VarId, tensor: Tensor) {
        let present = self.values[id.0].tensor.replace(tensor);
        assert!(present.is_none(), "only a value that was taken is put back");
    }

    /// Returns whether the value receives a gradient in backward.
    pub fn requires_grad(&self, id: VarId) -> bool {
        self.values[id.0].requires_grad
    }

    /// Takes the gradient of a value in the dtype of the value; zeros if it has received none.
    ///
    /// # Errors
    /// If there is no memory for the zeros, or to convert the gradient.
    pub fn take_grad_or_zeros(&mut self, id: VarId) -> Result<Tensor> {
        let Value { shape, dtype, .. } = self.values[id.0];
        match self.take_grad(id) {
            Some(grad) => cast(&self.device, grad, dtype),
            None => self.device.zeros(shape, dtype, Category::Activations),
        }
    }

    /// Takes the gradient of a value; `None` if it has received none.
    pub fn take_grad(&mut self, id: VarId) -> Option<Tensor> {
        self.values[id.0].grad.take()
    }

    /// Returns the loss, if there is a loss term. It is complete after forward if the tape does not record, and after backward if it does.
    /// `num_rows` is the number of rows of the first term.
    pub fn loss(&self) -> Option<&PendingMean> {
        self.loss.as_ref()
    }

    /// Returns the [metrics](Recorder::apply_metric), one per name.
    pub fn metrics(&self) -> &[Metric] {
        &self.metrics
    }

    /// Calls `visit` with each tensor that the tape holds for backward. Used to offload activations.
    pub fn for_each_tensor(&mut self, visit: impl FnMut(&mut Tensor)) {
        let values = self.values.iter_mut().filter_map(|value| value.tensor.as_mut());
        values.chain(self.tensors.iter_mut().flatten()).for_each(visit);
    }

    /// Frees the outputs of cheaply [recomputable](Operation::is_recomputable) operations. [`recompute`](Tape::recompute) must run before
    /// backward.
    pub fn free_recomputable(&mut self) {
        let recomputable = self.values.iter_mut().filter(|value| value.is_recomputable);
        recomputable.for_each(|value| value.tensor = None);
    }
}

fn checked(pass: PassState) -> PassState {
    assert!(pass.fp8.is_none() || pass.precision == Precision::Bf16, "fp8 needs bf16");
    pass
}

/// Returns the elements as `dtype`. Returns the tensor itself if it has that dtype.
fn cast(device: &Device, tensor: Tensor, dtype: DType) -> Result<Tensor> {
    if tensor.dtype() == dtype {
        return Ok(tensor);
    }
    let mut converted = device.empty(tensor.shape(), dtype, Category::Activations)?;
    device.convert(tensor.view(), converted.view_mut());
    Ok(converted)
}

/// Returns a copy of the tensor.
fn copy(device: &Device, tensor: &Tensor) -> Result<Tensor> {
    let mut copy = device.empty(tensor.shape(), tensor.dtype(), Category::Activations)?;
    device.copy(tensor.view(), copy.view_mut());
    Ok(copy)
}
