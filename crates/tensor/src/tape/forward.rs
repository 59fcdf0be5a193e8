//! Recording, and what forward of one operation works with.

use super::value::Value;
use super::{Node, Op, Operands, Recording, Tape, Var, Vector};
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
    /// If it makes another number of outputs.
    pub fn apply(&mut self, op: impl Into<Op>, inputs: impl Operands) -> Result<Var, DeviceError> {
        let [output] = self.apply_for(op, inputs)?;
        Ok(output)
    }

    /// Runs an operation with `N` outputs. One with none adds a term to the loss.
    ///
    /// # Errors
    /// If there is no memory for what it computes.
    ///
    /// # Panics
    /// If it makes another number of outputs.
    pub fn apply_for<const N: usize>(
        &mut self,
        op: impl Into<Op>,
        inputs: impl Operands,
    ) -> Result<[Var; N], DeviceError> {
        let op = op.into();
        let tape = &mut *self.tape;
        let first = tape.operands.len();
        inputs.append_to(&mut tape.operands);
        let node = Node {
            inputs: first..tape.operands.len(),
            outputs: tape.values.len()..tape.values.len(),
            saved: tape.tensors.len()..tape.tensors.len(),
            kept: 0..0,
            op,
        };
        let outputs = Forward::first(tape, self.parameters, node)?;
        assert_eq!(outputs.len(), N, "the operation has {} outputs", outputs.len());
        Ok(std::array::from_fn(|index| Var(outputs.start + index)))
    }

    /// A value.
    pub fn value(&self, var: &Var) -> View<'_> {
        self.tape.values[var.0].tensor().view()
    }

    /// The tape's device.
    pub fn device(&self) -> &Device {
        &self.tape.device
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
pub struct Forward<'a> {
    tape: &'a mut Tape,
    parameters: &'a dyn ParameterSource,
    inputs: Range<usize>,
    /// Where the next output goes, and the next saved tensor: at the end of the tape's lists, or where they were before.
    next_output: usize,
    next_saved: usize,
    has_parameters: bool,
}

impl<'a> Forward<'a> {
    /// Runs a new node's operation, and appends the node if the tape records; its outputs.
    fn first(
        tape: &'a mut Tape,
        parameters: &'a dyn ParameterSource,
        mut node: Node,
    ) -> Result<Range<usize>, DeviceError> {
        let operation = node.op.get();
        let mut cx = Forward {
            parameters,
            inputs: node.inputs.clone(),
            next_output: node.outputs.start,
            next_saved: node.saved.start,
            has_parameters: operation.has_parameters(),
            tape,
        };
        operation.forward(&mut cx)?;
        let tape = cx.tape;
        (node.outputs.end, node.saved.end) = (tape.values.len(), tape.tensors.len());
        let outputs = node.outputs.clone();
        match tape.recording {
            Recording::On => {
                for (place, input) in tape.operands[node.inputs.clone()].iter().enumerate() {
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
                tape.operands.truncate(node.inputs.start);
                tape.tensors.truncate(node.saved.start);
            }
        }
        Ok(outputs)
    }

    /// Runs the operation of a node again, for outputs that were given back.
    pub(super) fn again(
        tape: &'a mut Tape,
        parameters: &'a dyn ParameterSource,
        index: usize,
    ) -> Result<(), DeviceError> {
        let node = &tape.nodes[index];
        let (op, inputs) = (node.op.clone(), node.inputs.clone());
        let (next_output, next_saved) = (node.outputs.start, node.saved.start);
        let has_parameters = op.get().has_parameters();
        op.get().forward(&mut Forward { tape, parameters, inputs, next_output, next_saved, has_parameters })
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

    /// The value of an input.
    pub fn input(&self, index: usize) -> View<'_> {
        self.tape.values[self.tape.operands[self.inputs.start + index].value].tensor().view()
    }

    /// The value of an input, to compute in its memory: `None` where another operation, or backward of an earlier one, reads
    /// it. What it holds afterwards is what backward of this operation reads.
    pub fn input_mut(&mut self, index: usize) -> Option<ViewMut<'_>> {
        let operand = self.tape.operands[self.inputs.start + index];
        let value = &mut self.tape.values[operand.value];
        let is_free = operand.is_last && value.num_reads == 0 && !value.is_input;
        value.tensor.as_mut().filter(|_| is_free).map(Tensor::view_mut)
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
        self.next_output += 1;
        if let Some(value) = self.tape.values.get_mut(index) {
            value.tensor = Some(tensor);
            return;
        }
        let operands = &self.tape.operands[self.inputs.clone()];
        let wants_grad =
            self.has_parameters || operands.iter().any(|operand| self.tape.values[operand.value].wants_grad);
        self.tape.push(Value { tensor: Some(tensor), grad: None, wants_grad, is_input: false, num_reads: 0 });
    }

    /// Memory for what [`save`](Forward::save) will take, with unspecified contents: when the operation runs again, the same.
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
        self.next_saved += 1;
        match self.tape.tensors.get_mut(index) {
            Some(slot) => *slot = Some(tensor),
            None => self.tape.tensors.push(Some(tensor)),
        }
    }

    /// Adds to the sum of the losses of all rows, in nats.
    pub fn add_loss(&mut self, sum: f64) {
        self.tape.add_loss(sum);
    }
}

impl Tape {
    pub(super) fn add_loss(&mut self, sum: f64) {
        *self.loss_sum.get_or_insert(0.0) += sum;
    }

    /// Gives an operand's value back if this was the last operation to read it, and backward does not.
    fn release_unread(&mut self, index: usize) {
        let operand = self.operands[index];
        let value = &mut self.values[operand.value];
        if operand.is_last && value.num_reads == 0 && !value.is_input {
            value.tensor = None;
        }
    }
}
