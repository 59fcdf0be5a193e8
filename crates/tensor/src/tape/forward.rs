//! Recording, and what forward of one operation works with.

use super::value::Value;
use super::{Argument, Arguments, Node, Op, Operation, ReadBy, Recording, Tape, Var, Vector, copy};
use crate::device::{Device, DeviceError};
use crate::fp8::Fp8Layer;
use crate::parameter_table::{ParameterId, ParameterSpan};
use crate::parameters::ParameterSource;
use crate::precision::Precision;
use crate::shape::Shape;
use crate::tensor::{Tensor, View, ViewMut};
use std::ops::Range;
use trireme_base::{Category, DType};

/// Runs operations forward, and records them if the tape does.
pub struct Recorder<'a> {
    tape: &'a mut Tape,
    parameters: &'a dyn ParameterSource,
}

impl<'a> Recorder<'a> {
    pub(super) fn new(tape: &'a mut Tape, parameters: &'a dyn ParameterSource) -> Self {
        Recorder { tape, parameters }
    }

    /// Runs an operation with one output.
    ///
    /// # Errors
    /// If there is no memory for what it computes.
    ///
    /// # Panics
    /// If it takes another number of inputs, or makes another number of outputs.
    pub fn apply(&mut self, op: impl Into<Op>, inputs: impl Arguments) -> Result<Var, DeviceError> {
        let mut outputs = self.apply_many(op, inputs)?;
        assert_eq!(outputs.len(), 1, "the operation has another number of outputs");
        Ok(outputs.next().expect("there is one"))
    }

    /// Runs an operation that has no output, but adds to the loss.
    ///
    /// # Errors
    /// If there is no memory for what it computes.
    ///
    /// # Panics
    /// If it takes another number of inputs, or has an output.
    pub fn apply_loss(&mut self, op: impl Into<Op>, inputs: impl Arguments) -> Result<(), DeviceError> {
        assert_eq!(self.apply_many(op, inputs)?.len(), 0, "a loss has no output");
        Ok(())
    }

    /// Runs an operation; its outputs, in order.
    ///
    /// # Errors
    /// If there is no memory for what it computes.
    ///
    /// # Panics
    /// If it takes another number of inputs.
    pub fn apply_many<O: Into<Op>, A: Arguments>(
        &mut self,
        op: O,
        inputs: A,
    ) -> Result<impl ExactSizeIterator<Item = Var> + use<O, A>, DeviceError> {
        Ok(self.apply_all(op.into(), inputs)?.map(Var))
    }

    fn apply_all(&mut self, op: Op, inputs: impl Arguments) -> Result<Range<usize>, DeviceError> {
        let tape = &mut *self.tape;
        let first = tape.arguments.len();
        inputs.append_to(&mut tape.arguments);
        let num_inputs = tape.arguments.len() - first;
        assert!(op.get().num_inputs().contains(&num_inputs), "{op:?} does not take {num_inputs} inputs");
        let node = Node {
            inputs: first..tape.arguments.len(),
            outputs: tape.values.len()..tape.values.len(),
            saved: tape.tensors.len()..tape.tensors.len(),
            kept: 0..0,
            op,
        };
        ForwardContext::first(tape, self.parameters, node)
    }

    /// The tape, for what is never differentiated.
    ///
    /// # Panics
    /// If it records.
    pub(super) fn unrecorded(&mut self) -> (&mut Tape, &dyn ParameterSource) {
        assert_eq!(self.tape.recording, Recording::Off, "this runs forward only");
        (self.tape, self.parameters)
    }
}

/// What forward of one operation works with.
pub struct ForwardContext<'a> {
    tape: &'a mut Tape,
    parameters: &'a dyn ParameterSource,
    inputs: Range<usize>,
    /// Where the next output goes, and the next saved tensor: at the end of the tape's lists, or where they were before.
    next_output: usize,
    next_saved: usize,
    /// Of a node whose operation runs again: where its outputs and saved tensors end.
    ends: Option<[usize; 2]>,
    operation: &'a dyn Operation,
}

impl ForwardContext<'_> {
    /// Runs a new node's operation, and appends the node if the tape records; its outputs.
    fn first(
        tape: &mut Tape,
        parameters: &dyn ParameterSource,
        mut node: Node,
    ) -> Result<Range<usize>, DeviceError> {
        let operation = node.op.get();
        let mut cx = ForwardContext {
            parameters,
            inputs: node.inputs.clone(),
            next_output: node.outputs.start,
            next_saved: node.saved.start,
            ends: None,
            operation,
            tape: &mut *tape,
        };
        operation.forward(&mut cx)?;
        (node.outputs.end, node.saved.end) = (tape.values.len(), tape.tensors.len());
        let outputs = node.outputs.clone();
        match tape.recording {
            Recording::On => {
                let is_kept =
                    |place| !operation.is_recomputable() || operation.reads_input(place) != ReadBy::NEITHER;
                assert!(
                    (0..node.inputs.len()).all(is_kept),
                    "{operation:?} runs again, and reads all inputs"
                );
                for (place, input) in tape.arguments[node.inputs.clone()].iter().enumerate() {
                    tape.values[input.value].num_reads += operation.reads_input(place).count();
                }
                for (place, value) in tape.values[outputs.clone()].iter_mut().enumerate() {
                    value.num_reads += operation.reads_output(place).count();
                }
                let inputs = node.inputs.clone();
                tape.nodes.push(node);
                inputs.for_each(|index| tape.release_unread(index));
            }
            Recording::Off => {
                node.inputs.clone().for_each(|index| tape.release_unread(index));
                tape.arguments.truncate(node.inputs.start);
                tape.tensors.truncate(node.saved.start);
            }
        }
        Ok(outputs)
    }

    /// Runs the operation of a node again, for outputs that were given back.
    pub(super) fn again(
        tape: &mut Tape,
        parameters: &dyn ParameterSource,
        index: usize,
    ) -> Result<(), DeviceError> {
        let node = &tape.nodes[index];
        let (op, inputs) = (node.op.clone(), node.inputs.clone());
        let (next_output, next_saved) = (node.outputs.start, node.saved.start);
        let ends = Some([node.outputs.end, node.saved.end]);
        let operation = op.get();
        let cx = &mut ForwardContext { tape, parameters, inputs, next_output, next_saved, ends, operation };
        operation.forward(cx)
    }

    /// The device to compute on.
    pub fn device(&self) -> &Device {
        &self.tape.device
    }

    /// What products and activations are in.
    pub fn precision(&self) -> Precision {
        self.tape.precision
    }

    /// Position of the first token of every sequence.
    pub fn first_position(&self) -> usize {
        self.tape.first_position
    }

    /// Whether backward will follow.
    pub fn is_recording(&self) -> bool {
        self.tape.recording == Recording::On
    }

    pub(crate) fn fp8_layer(&self, weight: ParameterId) -> Option<Fp8Layer<'_>> {
        self.tape.fp8.as_deref()?.layer(weight, self.is_recording())
    }

    /// Number of inputs.
    pub fn num_inputs(&self) -> usize {
        self.inputs.len()
    }

    fn argument(&self, index: usize) -> &Argument {
        &self.tape.arguments[self.inputs.clone()][index]
    }

    fn value(&self, index: usize) -> &Value {
        &self.tape.values[self.argument(index).value]
    }

    /// The value of an input.
    pub fn input(&self, index: usize) -> View<'_> {
        self.value(index).tensor().view()
    }

    /// Returns the memory of an input for the operation to overwrite, or `None` if another operation still reads it. Backward
    /// of this operation sees the new contents.
    pub fn input_mut(&mut self, index: usize) -> Option<ViewMut<'_>> {
        let Argument { value, is_last } = *self.argument(index);
        let value = &mut self.tape.values[value];
        // What forward makes again would have the old contents.
        let is_free = is_last && value.num_reads == 0 && !value.is_input && !value.is_recomputable;
        value.tensor.as_mut().filter(|_| is_free).map(Tensor::view_mut)
    }

    /// Takes an input's tensor to reuse as an output. Returns `None` if another operation, or backward of this one, still
    /// reads it.
    pub fn take_input(&mut self, index: usize) -> Option<Tensor> {
        self.input_mut(index)?;
        let is_read = self.operation.reads_input(index) != ReadBy::NEITHER;
        let value = self.argument(index).value;
        self.tape.values[value].tensor.take_if(|_| !is_read)
    }

    /// A copy of the value of an input.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub fn copy_input(&self, index: usize) -> Result<Tensor, DeviceError> {
        copy(&self.tape.device, self.value(index).tensor())
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

    /// Memory for an output or for scratch, with unspecified contents.
    ///
    /// # Errors
    /// If there is none.
    pub fn empty(&self, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor, DeviceError> {
        self.tape.device.empty(shape.into(), dtype, Category::Activations)
    }

    /// Hands over the next output.
    pub fn output(&mut self, tensor: Tensor) {
        let index = self.next_output;
        assert!(
            self.ends.is_none_or(|[end, _]| index < end),
            "{:?} makes other outputs again",
            self.operation
        );
        self.next_output += 1;
        if let Some(value) = self.tape.values.get_mut(index) {
            value.tensor = Some(tensor);
            return;
        }
        let arguments = &self.tape.arguments[self.inputs.clone()];
        let requires_grad = self.operation.has_parameters()
            || arguments.iter().any(|argument| self.tape.values[argument.value].requires_grad);
        self.tape.push(Value::output(tensor, requires_grad, self.operation.is_recomputable()));
    }

    /// Memory for what [`save`](ForwardContext::save) will take, with unspecified contents: when the operation runs again, the same.
    ///
    /// # Errors
    /// If there is none.
    pub fn empty_to_save(&mut self, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor, DeviceError> {
        match self.tape.tensors.get_mut(self.next_saved).and_then(Option::take) {
            Some(saved) => Ok(saved),
            None => self.empty(shape, dtype),
        }
    }

    /// Saves a tensor for backward, as the next one.
    pub fn save(&mut self, tensor: Tensor) {
        let index = self.next_saved;
        assert!(
            self.ends.is_none_or(|[_, end]| index < end),
            "{:?} saves other tensors again",
            self.operation
        );
        self.next_saved += 1;
        match self.tape.tensors.get_mut(index) {
            Some(slot) => *slot = Some(tensor),
            None => self.tape.tensors.push(Some(tensor)),
        }
    }

    /// Adds to the sum of the losses of all rows.
    pub fn add_loss(&mut self, sum: f64) {
        self.tape.add_loss(sum);
    }
}

impl Tape {
    pub(super) fn add_loss(&mut self, sum: f64) {
        *self.loss_sum.get_or_insert(0.0) += sum;
    }

    /// Gives an argument's value back if this was the last operation to read it, and backward does not.
    fn release_unread(&mut self, index: usize) {
        let Argument { value, is_last } = self.arguments[index];
        let value = &mut self.values[value];
        if is_last && value.num_reads == 0 && !value.is_input {
            value.tensor = None;
        }
    }
}
