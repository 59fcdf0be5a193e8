//! Backward over a tape, and what backward of one operation works with.

use super::{Node, Place, ReadBy, Tape, Vector, copy};
use crate::device::{Device, DeviceError};
use crate::fp8::Fp8Layer;
use crate::parameter_table::{ParameterId, ParameterSpan};
use crate::parameters::ParameterSource;
use crate::precision::Precision;
use crate::shape::Shape;
use crate::tensor::{Tensor, View, ViewMut};
use trireme_base::{Category, DType};

/// Where the gradient of a span of parameters goes.
#[derive(Debug)]
pub struct GradTarget<'a> {
    /// Memory of the span's shape.
    pub view: ViewMut<'a>,
    /// Whether it already holds a part of this microbatch's gradient, to be added to.
    pub accumulate: bool,
}

/// Takes gradients of parameters during backward.
pub trait GradSink {
    /// Where to put a contribution to the gradient of `span`.
    ///
    /// # Errors
    /// If there is no memory for it.
    fn target(&mut self, span: &ParameterSpan) -> Result<GradTarget<'_>, DeviceError>;

    /// The contribution is written.
    fn grad_ready(&mut self, span: &ParameterSpan);
}

/// Lets `write` put the gradient of a span where the sink wants it, or add it there if its second argument says so.
///
/// # Errors
/// Those of the sink, and of `write`.
pub fn write_grad(
    sink: &mut dyn GradSink,
    span: &ParameterSpan,
    write: impl FnOnce(ViewMut<'_>, bool) -> Result<(), DeviceError>,
) -> Result<(), DeviceError> {
    let target = sink.target(span)?;
    write(target.view, target.accumulate)?;
    sink.grad_ready(span);
    Ok(())
}

/// Which halves of a node's backward have just run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Done {
    Both,
    InputHalf,
    WeightHalf,
}

impl Done {
    fn reads(self, by: ReadBy) -> usize {
        let input_half = by.input_half && self != Done::WeightHalf;
        let weight_half = by.weight_half && self != Done::InputHalf;
        usize::from(input_half) + usize::from(weight_half)
    }
}

impl Tape {
    /// Runs backward. `output` carries the gradient of the unit's output; without it, backward starts from the loss.
    ///
    /// # Errors
    /// If there is no memory for gradients.
    pub fn backward(
        &mut self,
        parameters: &dyn ParameterSource,
        output: Option<(Place, Tensor)>,
        sink: &mut dyn GradSink,
    ) -> Result<(), DeviceError> {
        self.begin_backward(output);
        for index in (0..self.nodes.len()).rev() {
            if self.is_reached(index) {
                let op = self.nodes[index].op.clone();
                op.get().backward(&mut Backward { tape: self, parameters, node: index }, sink)?;
                self.pass_grad(index, Done::Both)?;
            }
            self.leave(index, Done::Both);
        }
        self.nodes.clear();
        Ok(())
    }

    /// Runs the input halves of backward: the gradient of what the unit reads is there then, and the loss. `output` is as for
    /// [`backward`](Tape::backward).
    ///
    /// What the weight halves read stays: inputs of linear layers and of normalisations, and the gradients of their results. A
    /// gradient that goes on along a residual is copied for them.
    ///
    /// # Errors
    /// If there is no memory for gradients.
    pub fn backward_input(
        &mut self,
        parameters: &dyn ParameterSource,
        output: Option<(Place, Tensor)>,
    ) -> Result<(), DeviceError> {
        self.begin_backward(output);
        for index in (0..self.nodes.len()).rev() {
            if self.is_reached(index) {
                let op = self.nodes[index].op.clone();
                op.get().backward_input(&mut Backward { tape: self, parameters, node: index })?;
                self.pass_grad(index, Done::InputHalf)?;
            }
            self.leave(index, Done::InputHalf);
        }
        Ok(())
    }

    /// Runs the weight halves of backward, after [`backward_input`](Tape::backward_input).
    ///
    /// # Errors
    /// If there is no memory for them.
    pub fn backward_weight(
        &mut self,
        parameters: &dyn ParameterSource,
        sink: &mut dyn GradSink,
    ) -> Result<(), DeviceError> {
        for index in (0..self.nodes.len()).rev() {
            if self.nodes[index].op.get().has_parameters() && self.is_reached(index) {
                let op = self.nodes[index].op.clone();
                op.get().backward_weight(&mut Backward { tape: self, parameters, node: index }, sink)?;
                self.leave(index, Done::WeightHalf);
            }
        }
        self.nodes.clear();
        Ok(())
    }

    fn begin_backward(&mut self, output: Option<(Place, Tensor)>) {
        if let Some((Place(value), grad)) = output {
            self.values[value].grad = Some(grad);
        }
    }

    /// Whether a gradient has come to an output of a node, or the node adds to the loss.
    fn is_reached(&self, index: usize) -> bool {
        let outputs = &self.values[self.nodes[index].outputs.clone()];
        outputs.is_empty() || outputs.iter().any(|output| output.grad.is_some())
    }

    /// Gives the gradient of a node's output to the inputs that have the same: itself to the last, unless the weight half
    /// is still to read it.
    fn pass_grad(&mut self, index: usize, done: Done) -> Result<(), DeviceError> {
        let Node { op, outputs, .. } = &self.nodes[index];
        let (output, stays) = (outputs.start, done == Done::InputHalf && op.get().has_parameters());
        let mut inputs = std::mem::take(&mut self.passing);
        for (place, &input) in inputs.iter().enumerate() {
            if place + 1 == inputs.len() && !stays {
                let grad = self.values[output].grad.take().expect("the node was reached");
                self.add_grad(input, grad);
            } else {
                self.add_grad_of(input, output)?;
            }
        }
        inputs.clear();
        self.passing = inputs;
        Ok(())
    }

    /// Gives `grad` to a value that wants one: as its gradient, or added to it.
    fn add_grad(&mut self, value: usize, grad: Tensor) {
        let value = &mut self.values[value];
        match &mut value.grad {
            _ if !value.wants_grad => (),
            Some(sum) => self.device.add_assign(sum.view_mut(), grad.view()),
            slot => *slot = Some(grad),
        }
    }

    /// As [`add_grad`](Tape::add_grad) with the gradient of `output`, which stays.
    fn add_grad_of(&mut self, value: usize, output: usize) -> Result<(), DeviceError> {
        let grad = self.values[output].grad.take().expect("the node was reached");
        let value = &mut self.values[value];
        match &mut value.grad {
            _ if !value.wants_grad => (),
            Some(sum) => self.device.add_assign(sum.view_mut(), grad.view()),
            slot => *slot = Some(copy(&self.device, &grad)?),
        }
        self.values[output].grad = Some(grad);
        Ok(())
    }

    /// Gives back what nobody reads after these halves of a node.
    fn leave(&mut self, index: usize, done: Done) {
        let Node { op, inputs, outputs, saved, kept } = &mut self.nodes[index];
        let operation = op.get();
        for (place, input) in self.operands[inputs.clone()].iter().enumerate() {
            self.values[input.value].num_reads -= done.reads(operation.reads_input(place));
        }
        let is_done = done != Done::InputHalf || !operation.has_parameters();
        for (place, output) in self.values[outputs.clone()].iter_mut().enumerate() {
            output.num_reads -= done.reads(operation.reads_output(place));
            // All operations that read it came later on the tape.
            if output.num_reads == 0 && done != Done::WeightHalf {
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

/// What backward of one operation works with.
pub struct Backward<'a> {
    tape: &'a mut Tape,
    parameters: &'a dyn ParameterSource,
    node: usize,
}

impl Backward<'_> {
    fn operand(&self, index: usize) -> usize {
        self.tape.operands[self.tape.nodes[self.node].inputs.start + index].value
    }

    /// The device to compute on.
    pub fn device(&self) -> &Device {
        &self.tape.device
    }

    /// What products and activations are in.
    pub fn precision(&self) -> Precision {
        self.tape.precision
    }

    pub(crate) fn fp8_layer(&self, weight: ParameterId) -> Option<Fp8Layer<'_>> {
        self.tape.fp8.as_deref()?.layer(weight, true)
    }

    /// Number of inputs.
    pub fn num_inputs(&self) -> usize {
        self.tape.nodes[self.node].inputs.len()
    }

    /// The value of an input, as [`Operation::reads_input`](super::Operation::reads_input) has said it would be read.
    pub fn input(&self, index: usize) -> View<'_> {
        self.tape.values[self.operand(index)].tensor().view()
    }

    /// The value of an input for the input half to compute in: its memory if nobody else reads it, else a copy.
    ///
    /// # Errors
    /// If there is no memory for a copy.
    pub fn take_input(&mut self, index: usize) -> Result<Tensor, DeviceError> {
        let by = self.tape.nodes[self.node].op.get().reads_input(index);
        let place = self.operand(index);
        let value = &mut self.tape.values[place];
        match &mut value.tensor {
            tensor @ Some(_) if by == ReadBy::INPUT_HALF && value.num_reads == 1 => {
                Ok(tensor.take().expect("there is one"))
            }
            _ => copy(&self.tape.device, value.tensor()),
        }
    }

    /// The value of an output, as [`Operation::reads_output`](super::Operation::reads_output) has said it would be read.
    pub fn output(&self, index: usize) -> View<'_> {
        self.tape.values[self.tape.nodes[self.node].outputs.start + index].tensor().view()
    }

    /// The gradient of an output; `None` if nobody has read the output, while another output was read.
    pub fn output_grad(&self, index: usize) -> Option<View<'_>> {
        let output = &self.tape.values[self.tape.nodes[self.node].outputs.start + index];
        output.grad.as_ref().map(Tensor::view)
    }

    /// The gradient of the only output.
    ///
    /// # Panics
    /// If the operation has no output.
    pub fn grad(&self) -> View<'_> {
        self.output_grad(0).expect("backward runs where the output has a gradient")
    }

    /// The gradient of the only output, to compute in its memory, for operations without parameters.
    ///
    /// # Panics
    /// If the operation has parameters, whose gradients are made of the output's, or no output.
    pub fn take_output_grad(&mut self) -> Tensor {
        let node = &self.tape.nodes[self.node];
        assert!(!node.op.get().has_parameters(), "the weight half reads the gradient");
        let grad = self.tape.values[node.outputs.start].grad.take();
        grad.expect("backward runs where the output has a gradient")
    }

    /// What forward has saved, in its order.
    pub fn saved(&self, index: usize) -> Option<View<'_>> {
        let saved = &self.tape.nodes[self.node].saved;
        self.tape.tensors[saved.clone()].get(index)?.as_ref().map(Tensor::view)
    }

    /// Keeps a tensor for the weight half, as the next one.
    pub fn keep(&mut self, tensor: Tensor) {
        let (tape, node) = (&mut *self.tape, self.node);
        let kept = &mut tape.nodes[node].kept;
        if kept.start == kept.end {
            *kept = tape.tensors.len()..tape.tensors.len();
        }
        kept.end += 1;
        tape.tensors.push(Some(tensor));
    }

    /// What the input half has kept, in its order.
    pub fn kept(&self, index: usize) -> Option<View<'_>> {
        let kept = &self.tape.nodes[self.node].kept;
        self.tape.tensors[kept.clone()].get(index)?.as_ref().map(Tensor::view)
    }

    /// The values of parameters.
    pub fn parameter(&self, span: &ParameterSpan) -> View<'_> {
        self.parameters.span(span)
    }

    /// A source of all parameters.
    pub fn parameters(&self) -> &dyn ParameterSource {
        self.parameters
    }

    /// A vector of parameters, in f32, rounded to the precision.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub fn vector(&self, span: &ParameterSpan) -> Result<Vector<'_>, DeviceError> {
        Vector::new(&self.tape.device, self.tape.precision, self.parameters.span(span))
    }

    /// Memory for a gradient or for scratch, with unspecified contents.
    ///
    /// # Errors
    /// If there is none.
    pub fn empty(&self, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor, DeviceError> {
        self.tape.device.empty(shape.into(), dtype, Category::Activations)
    }

    /// Whether an input wants a gradient: data from outside has none.
    pub fn wants_grad(&self, index: usize) -> bool {
        self.tape.values[self.operand(index)].wants_grad
    }

    /// Gives an input its gradient, or a term of it. Dropped if the input wants none.
    pub fn add_grad(&mut self, index: usize, grad: Tensor) {
        self.tape.add_grad(self.operand(index), grad);
    }

    /// Gives an input the gradient of the only output as it is, once the operation needs it no more.
    pub fn pass_grad(&mut self, index: usize) {
        let operand = self.operand(index);
        self.tape.passing.push(operand);
    }

    /// The sum of the gradients that an input has been given so far, for the operation to add to in its own pass and to give
    /// back by [`set_grad_sum`](Backward::set_grad_sum).
    pub fn take_grad_sum(&mut self, index: usize) -> Option<Tensor> {
        let operand = self.operand(index);
        self.tape.values[operand].grad.take()
    }

    /// Gives an input the whole sum of its gradients so far.
    pub fn set_grad_sum(&mut self, index: usize, sum: Tensor) {
        let operand = self.operand(index);
        self.tape.values[operand].grad = Some(sum).filter(|_| self.tape.values[operand].wants_grad);
    }

    /// Multiplies every gradient of a backward pass that starts from a loss.
    pub fn loss_scale(&self) -> f32 {
        self.tape.loss_scale
    }

    /// Adds to the sum of the losses of all rows, in nats.
    pub fn add_loss(&mut self, sum: f64) {
        self.tape.add_loss(sum);
    }
}
