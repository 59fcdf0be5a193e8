//! Units, and one pass of a unit over one microbatch.

use crate::bundle::{Batch, Bundle};
use crate::past::Past;
use crate::tokens::DOCUMENT_STARTS;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use trireme_tensor::tape::{Attention, LatentHeads, Metric, PendingMean, Recorder, VarId};
use trireme_tensor::{DeviceError, GradSink, ParameterSource, Tape, Tensor, Var};

/// A part of a model that is run, gathered, reduced and stepped as one, such as a transformer block.
///
/// Each unit of a model reads what the one before has passed on. A closure that does what [`forward`](Unit::forward) does is one.
pub trait Unit: Send + Sync {
    /// Runs the unit: takes [inputs](UnitContext::input) and tensors of the [batch](UnitContext::batch), applies operations, and names
    /// its [outputs](UnitContext::output). It does the same in every pass of a run.
    ///
    /// # Errors
    /// If the device has no memory for a result.
    fn forward(&self, cx: &mut UnitContext<'_>) -> Result<(), DeviceError>;
}

impl<F: Fn(&mut UnitContext<'_>) -> Result<(), DeviceError> + Send + Sync> Unit for F {
    fn forward(&self, cx: &mut UnitContext<'_>) -> Result<(), DeviceError> {
        self(cx)
    }
}

/// What forward of a unit works with. It dereferences to the [`Recorder`] that applies operations.
pub struct UnitContext<'a> {
    recorder: Recorder<'a>,
    inputs: Bundle<Var>,
    outputs: Bundle<Var>,
    batch: &'a mut Batch,
    /// Tensors of the batch that are on the tape.
    lent: Bundle<VarId>,
    past: Option<&'a mut Past>,
}

impl<'a> Deref for UnitContext<'a> {
    type Target = Recorder<'a>;

    fn deref(&self) -> &Self::Target {
        &self.recorder
    }
}

impl DerefMut for UnitContext<'_> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.recorder
    }
}

impl UnitContext<'_> {
    /// What the unit before this one has passed on under this name. Whatever is not taken ends here.
    ///
    /// # Panics
    /// If there is no such output, or it was taken before.
    pub fn input(&mut self, name: &'static str) -> Var {
        self.inputs
            .take(name)
            .unwrap_or_else(|| panic!("the previous unit has no output '{name}', or it was taken already"))
    }

    /// The batch's tensor of this name, which has no gradient. A unit takes it once.
    ///
    /// # Panics
    /// If the batch has no such tensor, or it was taken before.
    pub fn batch(&mut self, name: &'static str) -> Var {
        self.optional_batch(name).unwrap_or_else(|| panic!("the batch has no '{name}'"))
    }

    /// As [`batch`](UnitContext::batch), or `None` if the batch has no such tensor: in generation there are no targets.
    ///
    /// # Panics
    /// If it was taken before.
    pub fn optional_batch(&mut self, name: &'static str) -> Option<Var> {
        assert!(self.lent.get(name).is_none(), "the unit has taken '{name}' of the batch already");
        let var = self.recorder.constant(self.batch.take(name)?);
        self.lent.push(name, var.id());
        Some(var)
    }

    /// Passes a value on to the next unit. Its dim 0 is the batch's, or a multiple. Tensors of the batch need not be passed on.
    ///
    /// # Errors
    /// If ranks of the tensor axis cannot have equal parts of its rows, and do.
    ///
    /// # Panics
    /// If the name is taken, the value is a tensor of the batch, or ranks of the tensor axis have only parts of it.
    pub fn output(&mut self, name: &'static str, value: Var) -> Result<(), DeviceError> {
        assert!(self.lent.iter().all(|(_, &lent)| lent != value.id()), "'{name}' is a tensor of the batch");
        let value = self.recorder.between_units(value)?;
        self.outputs.push(name, value);
        Ok(())
    }

    /// Makes heads of latent attention; in a generation, at any of its positions.
    ///
    /// # Errors
    /// If there is no memory for what it computes.
    pub fn latent_heads(&mut self, heads: &Arc<LatentHeads>, inputs: [Var; 3]) -> Result<Var, DeviceError> {
        match &mut self.past {
            None => self.recorder.apply(heads, inputs),
            Some(past) => {
                let rotary = past.whole_table(&heads.rotary)?;
                self.recorder.apply(&Arc::new(LatentHeads { shape: heads.shape, rotary }), inputs)
            }
        }
    }

    /// Runs attention: within documents, if the batch says [where they begin](DOCUMENT_STARTS); in a generation, over its past.
    ///
    /// # Errors
    /// If there is no memory for what it computes.
    pub fn attention(&mut self, attention: &Arc<Attention>, qkv: Var) -> Result<Var, DeviceError> {
        let document_starts = self.optional_batch(DOCUMENT_STARTS);
        match &mut self.past {
            None => match document_starts {
                Some(starts) => self.recorder.apply(attention, (qkv, starts)),
                None => self.recorder.apply(attention, [qkv]),
            },
            Some(past) => past.attention(&mut self.recorder, attention, qkv),
        }
    }
}

/// One unit's pass over one microbatch: forward's record, for backward. Its methods fail if the device has no memory.
#[derive(Debug)]
pub struct UnitPass {
    tape: Tape,
    inputs: Bundle<VarId>,
    outputs: Bundle<VarId>,
    /// The tensors of the batch that the unit reads.
    pub(crate) batch: Bundle<VarId>,
}

impl UnitPass {
    /// Runs a unit forward on an empty tape; the pass, and what the unit passes on. Afterwards the tensors are back in `batch`. With a
    /// past, the pass adds to it, and the tape begins at its [position](Past::position).
    pub fn forward(
        unit: &dyn Unit,
        mut tape: Tape,
        parameters: &dyn ParameterSource,
        inputs: Bundle<Tensor>,
        batch: &mut Batch,
        past: Option<&mut Past>,
    ) -> Result<(Self, Bundle<Tensor>), DeviceError> {
        let inputs: Bundle<Var> =
            inputs.into_iter().map(|(name, tensor)| (name, tape.input(tensor))).collect();
        let input_ids = inputs.iter().map(|(name, var)| (name, var.id())).collect();
        let recorder = tape.recorder(parameters);
        let mut pass =
            UnitContext { recorder, inputs, outputs: Bundle::new(), batch, lent: Bundle::new(), past };
        let done = unit.forward(&mut pass);
        let UnitContext { outputs, lent, .. } = pass;
        let ids = outputs.iter().map(|(name, var)| (name, var.id())).collect();
        let mut pass = UnitPass { tape, inputs: input_ids, outputs: ids, batch: lent };
        pass.give_back(batch);
        done?;
        let mut tensors = Bundle::new();
        for (name, var) in outputs.iter() {
            tensors.push(name, pass.tape.take_output(var)?);
        }
        Ok((pass, tensors))
    }

    /// Runs `run` with the tensors of the batch on the tape.
    fn with_batch<T>(
        &mut self,
        batch: &mut Batch,
        run: impl FnOnce(&mut Self) -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        for (name, &place) in self.batch.iter() {
            let tensor = batch.take(name).expect("a batch lives until its last reader's backward");
            self.tape.put_value(place, tensor);
        }
        let done = run(self);
        self.give_back(batch);
        done
    }

    fn give_back(&mut self, batch: &mut Batch) {
        for (name, &place) in self.batch.iter() {
            batch.push(name, self.tape.take_value(place));
        }
    }

    fn seeds(&self, grads: Bundle<Tensor>) -> impl Iterator<Item = (VarId, Tensor)> + use<> {
        let outputs = self.outputs.clone();
        grads
            .into_iter()
            .map(move |(name, grad)| (*outputs.get(name).expect("gradients are those of outputs"), grad))
    }

    /// Runs backward. `grads` are those of the outputs.
    pub fn backward(
        &mut self,
        parameters: &dyn ParameterSource,
        grads: Bundle<Tensor>,
        batch: &mut Batch,
        sink: &mut dyn GradSink,
    ) -> Result<(), DeviceError> {
        let seeds = self.seeds(grads);
        self.with_batch(batch, |pass| pass.tape.backward(parameters, seeds, sink))
    }

    /// Runs the input halves of backward. See [`Tape::backward_input`].
    pub fn backward_input(
        &mut self,
        parameters: &dyn ParameterSource,
        grads: Bundle<Tensor>,
        batch: &mut Batch,
    ) -> Result<(), DeviceError> {
        let seeds = self.seeds(grads);
        self.with_batch(batch, |pass| pass.tape.backward_input(parameters, seeds))
    }

    /// Runs the weight halves of backward, after [`backward_input`](UnitPass::backward_input).
    pub fn backward_weight(
        &mut self,
        parameters: &dyn ParameterSource,
        batch: &mut Batch,
        sink: &mut dyn GradSink,
    ) -> Result<(), DeviceError> {
        self.with_batch(batch, |pass| pass.tape.backward_weight(parameters, sink))
    }

    /// Takes the gradients of the inputs after backward, each in the type of its input; zeros where nothing has read it.
    pub fn take_input_grads(&mut self) -> Result<Bundle<Tensor>, DeviceError> {
        let mut grads = Bundle::new();
        for (name, &place) in self.inputs.iter() {
            if self.tape.requires_grad(place) {
                grads.push(name, self.tape.take_grad_or_zeros(place)?);
            }
        }
        Ok(grads)
    }

    /// Takes what the unit has read off the tape, for another forward.
    pub fn take_inputs(&mut self) -> Bundle<Tensor> {
        self.inputs.iter().map(|(name, &place)| (name, self.tape.take_value(place))).collect()
    }

    /// Drops what is quickly computed again. See [`Tape::keep_products`].
    pub fn keep_products(&mut self) {
        self.tape.keep_products();
    }

    /// Computes again what [`keep_products`](UnitPass::keep_products) has dropped.
    pub fn recompute(
        &mut self,
        parameters: &dyn ParameterSource,
        batch: &mut Batch,
    ) -> Result<(), DeviceError> {
        self.with_batch(batch, |pass| pass.tape.recompute(parameters))
    }

    /// Shows `visit` all memory that the pass holds. See [`Tape::for_each_memory`].
    pub fn for_each_memory(&mut self, visit: impl FnMut(&mut Tensor)) {
        self.tape.for_each_memory(visit);
    }

    pub(crate) fn num_bytes(&mut self) -> usize {
        let mut num_bytes = 0;
        self.for_each_memory(|tensor| num_bytes += tensor.num_bytes());
        num_bytes
    }

    /// The unit's terms of the loss: after forward without recording, after backward with it.
    pub fn loss(&self) -> Option<&PendingMean> {
        self.tape.loss()
    }

    /// The unit's metrics, after forward.
    pub fn metrics(&self) -> &[Metric] {
        self.tape.metrics()
    }

    /// What the unit has [reported](crate::Report): its loss, or a metric.
    pub fn reported(&self, metric: Option<&str>) -> Option<&PendingMean> {
        match metric {
            None => self.loss(),
            Some(name) => self.metrics().iter().find(|metric| metric.name == name).map(|metric| &metric.mean),
        }
    }

    /// The tape, empty, for another pass.
    pub fn into_tape(self) -> Tape {
        let mut tape = self.tape;
        tape.clear();
        tape
    }
}
