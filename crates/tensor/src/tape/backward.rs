//! Backward over a tape, and the context of an operation's backward.

use super::operation::Halves;
use super::value::Value;
use super::{BackwardContext, GradSink, Node, OperationContext, ReadBy, Sharding, Tape, VarId, cast, copy};
use crate::device::{Device, Result};
use crate::parameter_table::ParameterSpan;
use crate::parameters::ParameterSource;
use crate::shape::Shape;
use crate::tensor::Tensor;
use crate::view::{View, ViewMut};
use std::ops::{Deref, DerefMut};
use trireme_base::{Category, DType};

/// Calls `write` with the sink's memory for the gradient of `span`, and with whether to add to it, then reports the gradient to the sink.
///
/// # Errors
/// If the sink or `write` fails.
pub fn write_grad(
    sink: &mut dyn GradSink,
    span: &ParameterSpan,
    write: impl FnOnce(ViewMut<'_>, bool) -> Result<()>,
) -> Result<()> {
    let target = sink.target(span)?;
    write(target.view, target.accumulate)?;
    sink.grad_ready(span);
    Ok(())
}

/// Like [`write_grad`], for an `add` that always adds: zeroes the memory first if it holds no part of the gradient yet.
///
/// # Errors
/// If the sink fails.
pub fn add_to_grad(
    device: &Device,
    sink: &mut dyn GradSink,
    span: &ParameterSpan,
    add: impl FnOnce(ViewMut<'_>),
) -> Result<()> {
    write_grad(sink, span, |mut out, accumulate| {
        if !accumulate {
            device.zero(out.reborrow());
        }
        add(out);
        Ok(())
    })
}

impl Tape {
    /// Runs backward from the gradients of `outputs`: the unit's outputs, or none if the unit computes a loss.
    ///
    /// # Errors
    /// If the device or `sink` has no memory for a result, or if an exchange with other ranks fails.
    ///
    /// # Panics
    /// If a gradient does not have as many elements as its output.
    pub fn backward(
        &mut self,
        parameters: &dyn ParameterSource,
        outputs: impl IntoIterator<Item = (VarId, Tensor)>,
        sink: &mut dyn GradSink,
    ) -> Result<()> {
        self.begin_backward(outputs)?;
        for index in (0..self.nodes.len()).rev() {
            if self.prepare_output_grads(index)? {
                let op = self.nodes[index].op.clone();
                self.announce_partial_grads(index, sink);
                op.get().backward(&mut BackwardContext::new(self, parameters, index, Halves::Both), sink)?;
                self.pass_grad(index, Halves::Both)?;
            }
            self.release_after_backward(index, Halves::Both);
        }
        self.nodes.clear();
        Ok(())
    }

    /// Runs the input halves of backward. Afterwards, the gradients of the unit's inputs and the loss are complete. `outputs` are as for
    /// [`backward`](Tape::backward).
    ///
    /// Values that the weight halves read stay in memory: the inputs of linear layers and of normalizations, and the gradients of their
    /// outputs. A gradient that also flows along a residual connection is copied.
    ///
    /// # Errors
    /// If the device has no memory for a result, or if an exchange with other ranks fails.
    ///
    /// # Panics
    /// If a gradient does not have as many elements as its output, or if an operation with parameters takes its output gradient and keeps
    /// nothing for its weight half.
    pub fn backward_input(
        &mut self,
        parameters: &dyn ParameterSource,
        outputs: impl IntoIterator<Item = (VarId, Tensor)>,
    ) -> Result<()> {
        self.begin_backward(outputs)?;
        for index in (0..self.nodes.len()).rev() {
            if self.prepare_output_grads(index)? {
                let op = self.nodes[index].op.clone();
                let cx = &mut BackwardContext::new(self, parameters, index, Halves::Input);
                op.get().backward_input(cx)?;
                self.pass_grad(index, Halves::Input)?;
                assert!(
                    !op.get().has_parameters() || self.is_reached(index),
                    "{op:?} has taken the gradient, and kept nothing for the weight half"
                );
            }
            self.release_after_backward(index, Halves::Input);
        }
        Ok(())
    }

    /// Runs the weight halves of backward, after [`backward_input`](Tape::backward_input).
    ///
    /// # Errors
    /// As [`backward`](Tape::backward).
    pub fn backward_weight(
        &mut self,
        parameters: &dyn ParameterSource,
        sink: &mut dyn GradSink,
    ) -> Result<()> {
        for index in (0..self.nodes.len()).rev() {
            if self.nodes[index].op.get().has_parameters() && self.is_reached(index) {
                let op = self.nodes[index].op.clone();
                self.announce_partial_grads(index, sink);
                let cx = &mut BackwardContext::new(self, parameters, index, Halves::Weight);
                op.get().backward_weight(cx, sink)?;
                self.release_after_backward(index, Halves::Weight);
            }
        }
        self.nodes.clear();
        Ok(())
    }

    /// Reports to the sink whether the gradients of a node are partial sums.
    fn announce_partial_grads(&self, index: usize, sink: &mut dyn GradSink) {
        let Node { op, outputs, .. } = &self.nodes[index];
        let sharding =
            self.values[outputs.clone()].first().map_or(Sharding::Replicated, |value| value.sharding);
        sink.expect_partial_grads(self.pass.axes.tensor.is_some() && op.get().makes_partial_grads(sharding));
    }

    fn begin_backward(&mut self, outputs: impl IntoIterator<Item = (VarId, Tensor)>) -> Result<()> {
        outputs.into_iter().try_for_each(|(VarId(value), grad)| self.add_grad(value, grad))
    }

    /// Returns whether backward of a node runs, and prepares the gradients of its outputs. If a node with parameters has received no
    /// gradient, its output gradients are zeros, so that every parameter gets a gradient.
    fn prepare_output_grads(&mut self, index: usize) -> Result<bool> {
        let is_reached = self.is_reached(index);
        let Node { op, outputs, .. } = &self.nodes[index];
        let operation = op.get();
        let is_zero = !is_reached && operation.has_parameters();
        for output in &mut self.values[outputs.clone()] {
            output.grad = match output.grad.take() {
                None if is_zero => {
                    Some(self.device.zeros(output.shape, output.dtype, Category::Activations)?)
                }
                Some(grad) if !operation.accepts_f32_grads() => Some(cast(&self.device, grad, output.dtype)?),
                grad => grad,
            };
        }
        Ok(is_reached || is_zero)
    }

    /// Returns whether the node has received an output gradient or adds to the loss. If the input half has taken the gradient, the node
    /// counts as reached if it has kept tensors.
    fn is_reached(&self, index: usize) -> bool {
        let Node { outputs, kept, .. } = &self.nodes[index];
        let outputs = &self.values[outputs.clone()];
        outputs.is_empty() || !kept.is_empty() || outputs.iter().any(|output| output.grad.is_some())
    }

    /// Adds the gradient of a node's output to the inputs in `passed_through`. The last of them receives the tensor itself, unless the
    /// weight half still reads it.
    fn pass_grad(&mut self, index: usize, done: Halves) -> Result<()> {
        let Node { op, outputs, .. } = &self.nodes[index];
        let (output, stays) = (outputs.start, done == Halves::Input && op.get().has_parameters());
        let mut inputs = std::mem::take(&mut self.passed_through);
        for (place, &input) in inputs.iter().enumerate() {
            if place + 1 == inputs.len() && !stays {
                let grad = self.values[output].grad.take().expect("the node was reached");
                self.add_grad(input, grad)?;
            } else {
                self.add_grad_of(input, output)?;
            }
        }
        inputs.clear();
        self.passed_through = inputs;
        Ok(())
    }

    /// Adds `grad` to the gradient of a value, if the value requires one.
    ///
    /// A sum of gradients has the dtype of its value. A single gradient of a 16-bit value may be f32; it is rounded before an operation
    /// reads it, unless the operation [accepts f32](super::Operation::accepts_f32_grads).
    fn add_grad(&mut self, value: usize, grad: Tensor) -> Result<()> {
        let value = &mut self.values[value];
        if !value.requires_grad {
            return Ok(());
        }
        assert_eq!(grad.shape().num_elements(), value.shape.num_elements(), "a gradient of another shape");
        value.grad = Some(match value.grad.take() {
            None if value.dtype == DType::F32 => cast(&self.device, grad, DType::F32)?,
            None => grad,
            Some(sum) => {
                let mut sum = cast(&self.device, sum, value.dtype)?;
                let grad = cast(&self.device, grad, value.dtype)?;
                self.device.add_assign(sum.view_mut(), grad.view());
                sum
            }
        });
        Ok(())
    }

    /// Like [`add_grad`](Tape::add_grad) with a copy of the gradient of `output`.
    fn add_grad_of(&mut self, value: usize, output: usize) -> Result<()> {
        let grad = self.values[output].grad.take().expect("the node was reached");
        if self.values[value].requires_grad {
            let copied = copy(&self.device, &grad)?;
            self.add_grad(value, copied)?;
        }
        self.values[output].grad = Some(grad);
        Ok(())
    }

    /// Frees the tensors that are no longer read after these halves of a node.
    fn release_after_backward(&mut self, index: usize, done: Halves) {
        let Node { op, inputs, outputs, saved, kept, .. } = &mut self.nodes[index];
        let operation = op.get();
        for (place, input) in self.arguments[inputs.clone()].iter().enumerate() {
            self.values[input.value].num_reads -= done.reads(operation.reads_input(place));
        }
        let is_done = done != Halves::Input || !operation.has_parameters();
        for (place, output) in self.values[outputs.clone()].iter_mut().enumerate() {
            output.num_reads -= done.reads(operation.reads_output(place));
            // All readers of the output come later on the tape, so they are done.
            if output.num_reads == 0 && done != Halves::Weight {
                output.tensor = None;
            }
            if is_done {
                output.grad = None;
            }
        }
        if is_done {
            let tensors = saved.clone().chain(kept.clone());
            tensors.for_each(|index| self.tensors[index] = None);
        }
    }
}

impl<'a> Deref for BackwardContext<'a> {
    type Target = OperationContext<'a>;

    fn deref(&self) -> &Self::Target {
        &self.common
    }
}

impl DerefMut for BackwardContext<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.common
    }
}

impl<'a> BackwardContext<'a> {
    fn new(tape: &'a mut Tape, parameters: &'a dyn ParameterSource, node: usize, running: Halves) -> Self {
        let loss_weight = tape.nodes[node].loss_weight;
        BackwardContext { common: OperationContext { tape, parameters, loss_weight }, node, running }
    }

    fn argument(&self, index: usize) -> usize {
        self.tape.arguments[self.tape.nodes[self.node].inputs.clone()][index].value
    }

    fn result(&self, index: usize) -> &Value {
        &self.tape.values[self.tape.nodes[self.node].outputs.clone()][index]
    }

    /// Checks that the operation declares this read. Otherwise the value may be freed or overwritten.
    fn check_read(&self, by: ReadBy, what: &str, index: usize) {
        let op = &self.tape.nodes[self.node].op;
        assert!(self.running.reads(by) > 0, "{op:?} does not declare that backward reads {what} {index}");
    }

    /// Returns the number of inputs.
    pub fn num_inputs(&self) -> usize {
        self.tape.nodes[self.node].inputs.len()
    }

    /// Returns the value of an input. [`Operation::reads_input`](super::Operation::reads_input) must declare the read.
    pub fn input(&self, index: usize) -> View<'_> {
        self.check_read(self.tape.nodes[self.node].op.get().reads_input(index), "input", index);
        self.tape.values[self.argument(index)].tensor().view()
    }

    /// Returns the sharding of an input on the tensor axis.
    pub fn input_sharding(&self, index: usize) -> Sharding {
        self.tape.values[self.argument(index)].sharding
    }

    /// Returns the sharding of the only output on the tensor axis.
    pub fn output_sharding(&self) -> Sharding {
        self.result(0).sharding
    }

    /// Returns the shape of an input, also if its value is freed.
    pub fn input_shape(&self, index: usize) -> Shape {
        self.tape.values[self.argument(index)].shape
    }

    /// Returns the dtype of an input, also if its value is freed.
    pub fn input_dtype(&self, index: usize) -> DType {
        self.tape.values[self.argument(index)].dtype
    }

    /// Returns an input for the input half to compute in place: its own memory, or a copy if it has another reader or is an input of the
    /// tape.
    ///
    /// # Errors
    /// If there is no memory for the copy.
    #[expect(clippy::missing_panics_doc, reason = "the tensor was just matched")]
    pub fn take_or_copy_input(&mut self, index: usize) -> Result<Tensor> {
        let by = self.tape.nodes[self.node].op.get().reads_input(index);
        let place = self.argument(index);
        let tape = &mut *self.common.tape;
        let value = &mut tape.values[place];
        match &mut value.tensor {
            tensor @ Some(_) if by == ReadBy::INPUT_HALF && value.num_reads == 1 && !value.is_input => {
                Ok(tensor.take().expect("there is one"))
            }
            _ => copy(&tape.device, value.tensor()),
        }
    }

    /// Returns the value of an output. [`Operation::reads_output`](super::Operation::reads_output) must declare the read.
    pub fn output(&self, index: usize) -> View<'_> {
        self.check_read(self.tape.nodes[self.node].op.get().reads_output(index), "output", index);
        self.result(index).tensor().view()
    }

    /// Returns the gradient of an output; `None` if no operation has read the output.
    pub fn output_grad(&self, index: usize) -> Option<View<'_>> {
        self.result(index).grad.as_ref().map(Tensor::view)
    }

    /// Returns the gradient of the only output.
    ///
    /// # Panics
    /// If the operation has no output.
    pub fn grad(&self) -> View<'_> {
        self.output_grad(0).expect("backward runs where the output has a gradient")
    }

    /// Takes the gradient of the only output, to compute in its memory. The weight half can no longer read it: an operation with parameters
    /// must [keep](BackwardContext::keep) the tensors that the weight half needs.
    ///
    /// # Panics
    /// If the operation has no output. After the input half, if the operation has parameters and has kept nothing.
    pub fn take_output_grad(&mut self) -> Tensor {
        let tape = &mut *self.common.tape;
        let grad = tape.values[tape.nodes[self.node].outputs.start].grad.take();
        grad.expect("backward runs where the output has a gradient")
    }

    /// Takes a tensor saved by forward, for the input half to compute in its memory. Panics if forward has not saved a tensor at this
    /// index, or if it was already taken.
    pub(super) fn take_saved(&mut self, index: usize) -> Tensor {
        let place = self.tape.nodes[self.node].saved.start + index;
        assert!(self.tape.nodes[self.node].saved.contains(&place), "nothing was saved as {index}");
        self.tape.tensors[place].take().expect("it is taken once")
    }

    /// Returns the tensor that forward saved at this index, if there is one.
    pub fn saved(&self, index: usize) -> Option<View<'_>> {
        let saved = &self.tape.nodes[self.node].saved;
        self.tape.tensors[saved.clone()].get(index)?.as_ref().map(Tensor::view)
    }

    /// Keeps a tensor for the weight half. Kept tensors are numbered in the order of the calls.
    pub fn keep(&mut self, tensor: Tensor) {
        let (tape, node) = (&mut *self.common.tape, self.node);
        let kept = &mut tape.nodes[node].kept;
        if kept.start == kept.end {
            *kept = tape.tensors.len()..tape.tensors.len();
        }
        kept.end += 1;
        tape.tensors.push(Some(tensor));
    }

    /// Returns the tensor that the input half kept at this index, if there is one.
    pub fn kept(&self, index: usize) -> Option<View<'_>> {
        let kept = &self.tape.nodes[self.node].kept;
        self.tape.tensors[kept.clone()].get(index)?.as_ref().map(Tensor::view)
    }

    /// Returns whether an input requires a gradient. Input data does not.
    pub fn requires_grad(&self, index: usize) -> bool {
        self.tape.values[self.argument(index)].requires_grad
    }

    /// Adds `grad` to the gradient of an input. Dropped if the input requires none.
    ///
    /// # Errors
    /// If there is no memory to convert the gradient to the dtype of the input.
    ///
    /// # Panics
    /// If `grad` and the input differ in their number of elements.
    pub fn add_grad(&mut self, index: usize, grad: Tensor) -> Result<()> {
        let argument = self.argument(index);
        self.tape.add_grad(argument, grad)
    }

    /// Adds the gradient of the only output, unchanged, to the gradient of an input. Takes effect after the operation's backward, so that
    /// it may move the tensor.
    pub fn pass_grad(&mut self, index: usize) {
        let argument = self.argument(index);
        self.tape.passed_through.push(argument);
    }

    /// Takes the sum of an input's gradients so far. The operation adds to it and puts it back with
    /// [`set_grad_sum`](BackwardContext::set_grad_sum).
    pub(super) fn take_grad_sum(&mut self, index: usize) -> Option<Tensor> {
        let argument = self.argument(index);
        self.tape.values[argument].grad.take()
    }

    /// Sets the sum of an input's gradients so far.
    pub(super) fn set_grad_sum(&mut self, index: usize, sum: Tensor) {
        let argument = self.argument(index);
        self.tape.values[argument].grad = Some(sum).filter(|_| self.tape.values[argument].requires_grad);
    }

    /// Returns the factor of the gradient of a loss: the pass's [scale](super::PassState::loss_scale) times the term's weight.
    pub fn loss_grad_factor(&self) -> f32 {
        self.tape.pass.loss_scale * self.loss_weight
    }
}
