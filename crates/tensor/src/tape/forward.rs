//! Recording of operations, and the context of their forward.

use super::value::Value;
use super::{
    Argument, Arguments, ForwardContext, Metric, Node, Op, OperationContext, ReadBy, Recording, Sharding,
    Tape, Var, copy,
};
use crate::device::{Device, Result};
use crate::parameters::ParameterSource;
use crate::shape::Shape;
use crate::tensor::Tensor;
use crate::view::{View, ViewMut};
use std::ops::{Deref, DerefMut, Range};
use trireme_base::DType;

/// Runs operations forward and records them if the tape records.
pub struct Recorder<'a> {
    pub(super) tape: &'a mut Tape,
    parameters: &'a dyn ParameterSource,
}

impl Recorder<'_> {
    /// Runs an operation with one output.
    ///
    /// # Errors
    /// If there is no memory for a result, if an [exchange](super::AxisOps::start) with other ranks fails, or if the ranks of an axis
    /// cannot have equal shards of a value.
    ///
    /// # Panics
    /// If the operation does not take this number of inputs, or if it does not have one output.
    pub fn apply(&mut self, op: impl Into<Op>, inputs: impl Arguments) -> Result<Var> {
        let mut outputs = self.apply_many(op, inputs)?;
        assert_eq!(outputs.len(), 1, "the operation has another number of outputs");
        Ok(outputs.next().expect("there is one"))
    }

    /// Runs an operation without outputs that adds to the loss: `weight` times the mean over its rows.
    ///
    /// # Errors
    /// As [`apply`](Recorder::apply).
    ///
    /// # Panics
    /// If the operation does not take this number of inputs, or if it has an output.
    pub fn apply_loss(&mut self, op: impl Into<Op>, inputs: impl Arguments, weight: f32) -> Result<()> {
        assert!(self.apply_all(op.into(), inputs, weight)?.is_empty(), "a loss has no output");
        Ok(())
    }

    /// Runs an operation that would add to the loss, and reports its mean as the metric `name` instead: the mean over the rows of a step,
    /// on all ranks. The operation is not recorded. Metrics of the same name are combined into one mean over all their rows.
    ///
    /// # Errors
    /// As [`apply`](Recorder::apply).
    ///
    /// # Panics
    /// If the operation does not take this number of inputs, has an output, or adds nothing to the loss.
    pub fn apply_metric(
        &mut self,
        name: &'static str,
        op: impl Into<Op>,
        inputs: impl Arguments,
    ) -> Result<()> {
        let recording = std::mem::replace(&mut self.tape.recording, Recording::Off);
        let done = self.report(name, op.into(), inputs);
        self.tape.recording = recording;
        done
    }

    /// Like [`apply_metric`](Recorder::apply_metric), but backward adds `weight` times the gradient of the mean: an auxiliary training loss
    /// that is not part of the reported loss. Its value is known after forward.
    ///
    /// # Errors
    /// As [`apply`](Recorder::apply).
    ///
    /// # Panics
    /// As [`apply_metric`](Recorder::apply_metric).
    pub fn apply_auxiliary_loss(
        &mut self,
        name: &'static str,
        op: impl Into<Op>,
        inputs: impl Arguments,
        weight: f32,
    ) -> Result<()> {
        self.report(name, op.into(), inputs)?;
        if self.tape.recording == Recording::On {
            self.tape.nodes.last_mut().expect("it is recorded").loss_weight = weight;
        }
        Ok(())
    }

    fn report(&mut self, name: &'static str, op: Op, inputs: impl Arguments) -> Result<()> {
        let loss = self.tape.loss.take();
        let outputs = self.apply_all(op, inputs, 1.0);
        let found = std::mem::replace(&mut self.tape.loss, loss);
        assert!(outputs?.is_empty(), "a metric has no output");
        let mean = found.expect("a metric is what an operation would add to the loss");
        match self.tape.metrics.iter_mut().find(|metric| metric.name == name) {
            Some(Metric { mean: all, .. }) => {
                self.tape.device.add_term(mean.sum.view(), 1.0, Some(1.0), all.sum.view_mut());
                all.num_rows += mean.num_rows;
            }
            None => self.tape.metrics.push(Metric { name, mean }),
        }
        Ok(())
    }

    /// Returns the device of the tape.
    pub fn device(&self) -> &Device {
        &self.tape.device
    }

    /// Adds a value without a gradient to the tape. See [`Tape::constant`].
    pub fn constant(&mut self, tensor: Tensor) -> Var {
        self.tape.constant(tensor)
    }

    /// Runs an operation. Returns its outputs, in order.
    ///
    /// # Errors
    /// As [`apply`](Recorder::apply).
    ///
    /// # Panics
    /// If the operation does not take this number of inputs.
    pub fn apply_many<O: Into<Op>, A: Arguments>(
        &mut self,
        op: O,
        inputs: A,
    ) -> Result<impl ExactSizeIterator<Item = Var> + use<O, A>> {
        Ok(self.apply_all(op.into(), inputs, 1.0)?.map(Var))
    }

    fn apply_all(&mut self, op: Op, inputs: impl Arguments, loss_weight: f32) -> Result<Range<usize>> {
        let first = self.tape.arguments.len();
        inputs.append_to(&mut self.tape.arguments);
        let first = self.reshard_inputs(op.get(), first)?;
        let first = self.exchange_for_heads(op.get(), first)?;
        let tape = &mut *self.tape;
        let num_inputs = tape.arguments.len() - first;
        assert!(op.get().num_inputs().contains(&num_inputs), "{op:?} does not take {num_inputs} inputs");
        let node = Node {
            inputs: first..tape.arguments.len(),
            outputs: tape.values.len()..tape.values.len(),
            saved: tape.tensors.len()..tape.tensors.len(),
            kept: 0..0,
            loss_weight,
            op: op.clone(),
        };
        let outputs = ForwardContext::run_node(tape, self.parameters, node)?;
        self.exchange_for_positions(&op, outputs)
    }

    /// Returns the tape and the parameters, for computations without backward. Panics if the tape records.
    pub(super) fn unrecorded(&mut self) -> (&mut Tape, &dyn ParameterSource) {
        assert_eq!(self.tape.recording, Recording::Off, "this runs forward only");
        (self.tape, self.parameters)
    }
}

impl<'a> Deref for ForwardContext<'a> {
    type Target = OperationContext<'a>;

    fn deref(&self) -> &Self::Target {
        &self.common
    }
}

impl DerefMut for ForwardContext<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.common
    }
}

impl ForwardContext<'_> {
    /// Runs a new node's operation and, if the tape records, appends the node. Returns the indices of the outputs.
    fn run_node(tape: &mut Tape, parameters: &dyn ParameterSource, mut node: Node) -> Result<Range<usize>> {
        let operation = node.op.get();
        let sharding = tape.output_sharding(operation, &tape.arguments[node.inputs.clone()]);
        let mut cx = ForwardContext {
            common: OperationContext { tape: &mut *tape, parameters, loss_weight: node.loss_weight },
            inputs: node.inputs.clone(),
            next_output: node.outputs.start,
            next_saved: node.saved.start,
            ends: None,
            sharding,
            operation,
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

    /// Recomputes the freed outputs of a node.
    fn recompute_node(tape: &mut Tape, parameters: &dyn ParameterSource, index: usize) -> Result<()> {
        let node = &tape.nodes[index];
        let (op, inputs) = (node.op.clone(), node.inputs.clone());
        let (next_output, next_saved) = (node.outputs.start, node.saved.start);
        let ends = Some([node.outputs.end, node.saved.end]);
        let operation = op.get();
        let sharding = tape.values[next_output].sharding;
        let common = OperationContext { loss_weight: node.loss_weight, tape, parameters };
        let mut cx = ForwardContext { common, inputs, next_output, next_saved, ends, sharding, operation };
        operation.forward(&mut cx)
    }

    /// Returns the number of inputs.
    pub fn num_inputs(&self) -> usize {
        self.inputs.len()
    }

    /// Returns the sharding of an input on the tensor axis.
    pub fn input_sharding(&self, index: usize) -> Sharding {
        self.value(index).sharding
    }

    /// Returns the sharding of the outputs on the tensor axis.
    pub fn output_sharding(&self) -> Sharding {
        self.sharding
    }

    fn argument(&self, index: usize) -> &Argument {
        &self.tape.arguments[self.inputs.clone()][index]
    }

    fn value(&self, index: usize) -> &Value {
        &self.tape.values[self.argument(index).value]
    }

    /// Returns the value of an input.
    pub fn input(&self, index: usize) -> View<'_> {
        self.value(index).tensor().view()
    }

    /// Returns the memory of an input for the operation to overwrite. Returns `None` if another operation still reads the input, if it is
    /// an input of the tape, or if it can be recomputed. If backward of this operation reads the input, it sees the new contents.
    pub fn input_mut(&mut self, index: usize) -> Option<ViewMut<'_>> {
        let Argument { value, is_last } = *self.argument(index);
        let value = &mut self.tape.values[value];
        // A recomputation would restore the old contents.
        let is_free = is_last && value.num_reads == 0 && !value.is_input && !value.is_recomputable;
        value.tensor.as_mut().filter(|_| is_free).map(Tensor::view_mut)
    }

    /// Takes an input's tensor to reuse as an output. Returns `None` if backward of this operation reads it, and in the cases of
    /// [`input_mut`](ForwardContext::input_mut).
    pub fn take_input(&mut self, index: usize) -> Option<Tensor> {
        self.input_mut(index)?;
        let is_read = self.operation.reads_input(index) != ReadBy::NEITHER;
        let value = self.argument(index).value;
        self.tape.values[value].tensor.take_if(|_| !is_read)
    }

    /// Like [`take_input`](ForwardContext::take_input), but returns a copy instead of `None`.
    ///
    /// # Errors
    /// If there is no memory for the copy.
    pub fn take_or_copy_input(&mut self, index: usize) -> Result<Tensor> {
        match self.take_input(index) {
            Some(tensor) => Ok(tensor),
            None => self.copy_input(index),
        }
    }

    /// Returns a copy of an input.
    ///
    /// # Errors
    /// If there is no memory for the copy.
    pub fn copy_input(&self, index: usize) -> Result<Tensor> {
        copy(&self.tape.device, self.value(index).tensor())
    }

    /// Completes the output of a row-parallel layer: sums the ranks' partial sums `term` over the tensor axis, then adds bias and residual.
    pub(super) fn finish_row_parallel(
        &self,
        term: Tensor,
        bias: Option<View<'_>>,
        residual: Option<View<'_>>,
    ) -> Result<Tensor> {
        let sum = self.start_sum(term, self.output_sharding())?;
        if bias.is_none() && residual.is_none() {
            return self.finish_exchange(sum);
        }
        let sum = self.finish_temporary(sum)?;
        let dtype = if residual.is_some() { DType::F32 } else { sum.dtype() };
        let mut y = self.empty(sum.shape(), dtype)?;
        self.device().add_bias(sum.view(), bias, residual, y.view_mut());
        Ok(y)
    }

    /// Sets the next output.
    ///
    /// # Panics
    /// In a recomputation, if all outputs of the first run are set.
    pub fn output(&mut self, tensor: Tensor) {
        let index = self.next_output;
        let is_expected = self.ends.is_none_or(|[end, _]| index < end);
        assert!(is_expected, "{:?} makes other outputs again", self.operation);
        self.next_output += 1;
        if let Some(value) = self.tape.values.get_mut(index) {
            value.tensor = Some(tensor);
            return;
        }
        let arguments = &self.tape.arguments[self.inputs.clone()];
        let has_grad = self.operation.has_parameters()
            || arguments.iter().any(|argument| self.tape.values[argument.value].requires_grad);
        let requires_grad = has_grad && tensor.dtype().is_float();
        let is_recomputable = self.operation.is_recomputable();
        let value =
            Value { sharding: self.sharding, ..Value::output(tensor, requires_grad, is_recomputable) };
        self.tape.push(value);
    }

    /// Allocates memory for a tensor that [`save`](ForwardContext::save) will take, with unspecified contents. In a recomputation, returns
    /// the tensor saved before.
    ///
    /// # Errors
    /// As [`Device::empty`].
    pub fn empty_to_save(&mut self, shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
        let index = self.next_saved;
        match self.tape.tensors.get_mut(index).and_then(Option::take) {
            Some(saved) => Ok(saved),
            None => self.empty(shape, dtype),
        }
    }

    /// Saves a tensor for backward. Saved tensors are numbered in the order of the calls.
    ///
    /// # Panics
    /// In a recomputation, if all tensors that the first run saved are saved.
    pub fn save(&mut self, tensor: Tensor) {
        let index = self.next_saved;
        let is_expected = self.ends.is_none_or(|[_, end]| index < end);
        assert!(is_expected, "{:?} saves other tensors again", self.operation);
        self.next_saved += 1;
        match self.tape.tensors.get_mut(index) {
            Some(slot) => *slot = Some(tensor),
            None => self.tape.tensors.push(Some(tensor)),
        }
    }
}

impl Tape {
    /// Returns a recorder for operations that read `parameters`.
    pub fn recorder<'a>(&'a mut self, parameters: &'a dyn ParameterSource) -> Recorder<'a> {
        Recorder { tape: self, parameters }
    }

    /// Recomputes the outputs that [`free_recomputable`](Tape::free_recomputable) has freed, with the same bits.
    ///
    /// # Errors
    /// If there is no memory for a result, or if an exchange with other ranks fails.
    pub fn recompute(&mut self, parameters: &dyn ParameterSource) -> Result<()> {
        for index in 0..self.nodes.len() {
            let node = &self.nodes[index];
            let is_missing = |value: &Value| value.tensor.is_none() && value.num_reads > 0;
            if node.op.get().is_recomputable() && self.values[node.outputs.clone()].iter().any(is_missing) {
                ForwardContext::recompute_node(self, parameters, index)?;
            }
        }
        Ok(())
    }

    /// Frees an argument's value if this operation is its last reader and backward does not read it.
    fn release_unread(&mut self, index: usize) {
        let Argument { value, is_last } = self.arguments[index];
        let value = &mut self.values[value];
        if is_last && value.num_reads == 0 && !value.is_input {
            value.tensor = None;
        }
    }
}
