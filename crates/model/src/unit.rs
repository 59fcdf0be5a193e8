//! Units, and the pass of a unit over a microbatch.

use crate::bundle::{Batch, Bundle};
use crate::kv_cache::KvCache;
use crate::tokens::DOCUMENT_STARTS;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use trireme_tensor::tape::{Attention, LatentHeads, Metric, PendingMean, Recorder, VarId};
use trireme_tensor::{DeviceError, GradSink, ParameterSource, Tape, Tensor, Var};

/// A part of a model that is run, gathered, reduced and updated as one, such as a transformer block.
///
/// Each unit reads the outputs of the previous one. Closures with the signature of [`forward`](Unit::forward) implement this trait.
pub trait Unit: Send + Sync {
    /// Runs the unit: takes [inputs](UnitContext::input) and tensors of the [batch](UnitContext::batch), applies operations, and names its
    /// [outputs](UnitContext::output). Every pass of a run must apply the same operations.
    ///
    /// # Errors
    /// If the device cannot allocate memory for a result.
    fn forward(&self, cx: &mut UnitContext<'_>) -> Result<(), DeviceError>;
}

impl<F: Fn(&mut UnitContext<'_>) -> Result<(), DeviceError> + Send + Sync> Unit for F {
    fn forward(&self, cx: &mut UnitContext<'_>) -> Result<(), DeviceError> {
        self(cx)
    }
}

/// The context of a unit's forward pass: its inputs, the batch, and its outputs. Dereferences to the [`Recorder`] that applies operations.
pub struct UnitContext<'a> {
    recorder: Recorder<'a>,
    inputs: Bundle<Var>,
    outputs: Bundle<Var>,
    batch: &'a mut Batch,
    /// Tensors of the batch that are on the tape.
    taken: Bundle<VarId>,
    kv_cache: Option<&'a mut KvCache>,
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
    /// Takes the previous unit's output of this name. Outputs that no unit takes are dropped.
    ///
    /// # Panics
    /// If there is no such output, or if it was already taken.
    pub fn input(&mut self, name: &'static str) -> Var {
        self.inputs
            .take(name)
            .unwrap_or_else(|| panic!("the previous unit has no output '{name}', or it was taken already"))
    }

    /// Takes the batch's tensor of this name, which has no gradient. A unit may take it once.
    ///
    /// # Panics
    /// If the batch has no such tensor, or if it was already taken.
    pub fn batch(&mut self, name: &'static str) -> Var {
        self.optional_batch(name).unwrap_or_else(|| panic!("the batch has no '{name}'"))
    }

    /// Like [`batch`](UnitContext::batch), but returns `None` if the batch has no such tensor. For example, generation has no targets.
    ///
    /// # Panics
    /// If the tensor was already taken.
    pub fn optional_batch(&mut self, name: &'static str) -> Option<Var> {
        assert!(self.taken.get(name).is_none(), "the unit has taken '{name}' of the batch already");
        let var = self.recorder.constant(self.batch.take(name)?);
        self.taken.push(name, var.id());
        Some(var)
    }

    /// Passes a value to the next unit. Its dim 0 must be the number of samples, or a multiple. Tensors of the batch need not be passed on:
    /// every unit can take them.
    ///
    /// # Errors
    /// If sequence parallelism cannot split its rows equally between the ranks of the tensor axis, or if memory cannot be allocated.
    ///
    /// # Panics
    /// If the name is taken, if the value is a tensor of the batch, or if it is still split between the ranks of the tensor axis, like the
    /// output of a column-parallel layer.
    pub fn output(&mut self, name: &'static str, value: Var) -> Result<(), DeviceError> {
        assert!(
            self.taken.iter().all(|(_, &taken)| taken != value.id()),
            "'{name}' is a tensor of the batch"
        );
        let value = self.recorder.reshard_between_units(value)?;
        self.outputs.push(name, value);
        Ok(())
    }

    /// Computes the heads of latent attention. In generation, uses a rotary table for all positions of the KV cache.
    ///
    /// # Errors
    /// If memory for the result cannot be allocated.
    pub fn latent_heads(&mut self, heads: &Arc<LatentHeads>, inputs: [Var; 3]) -> Result<Var, DeviceError> {
        match &mut self.kv_cache {
            None => self.recorder.apply(heads, inputs),
            Some(kv_cache) => {
                let rotary = kv_cache.full_table(&heads.rotary)?;
                self.recorder.apply(&Arc::new(LatentHeads { shape: heads.shape, rotary }), inputs)
            }
        }
    }

    /// Computes attention: within documents, if the batch has [document starts](DOCUMENT_STARTS), and in generation over the KV cache.
    ///
    /// # Errors
    /// If memory for the result cannot be allocated.
    pub fn attention(&mut self, attention: &Arc<Attention>, qkv: Var) -> Result<Var, DeviceError> {
        let document_starts = self.optional_batch(DOCUMENT_STARTS);
        match &mut self.kv_cache {
            None => match document_starts {
                Some(starts) => self.recorder.apply(attention, (qkv, starts)),
                None => self.recorder.apply(attention, [qkv]),
            },
            Some(kv_cache) => kv_cache.attention(&mut self.recorder, attention, qkv),
        }
    }
}

/// The pass of a unit over a microbatch, with the activations that backward needs.
#[derive(Debug)]
pub struct UnitPass {
    tape: Tape,
    inputs: Bundle<VarId>,
    outputs: Bundle<VarId>,
    /// The tensors of the batch that the unit reads.
    pub(crate) batch: Bundle<VarId>,
}

impl UnitPass {
    /// Runs a unit forward on an empty tape. Returns the pass and the unit's outputs. The tensors taken from `batch` are returned to it. If
    /// there is a KV cache `kv_cache`, the pass appends to it, and the tape must start at its [position](KvCache::position).
    ///
    /// # Errors
    /// As [`Unit::forward`], and if the device cannot allocate memory to copy an output.
    pub fn forward(
        unit: &dyn Unit,
        mut tape: Tape,
        parameters: &dyn ParameterSource,
        inputs: Bundle<Tensor>,
        batch: &mut Batch,
        kv_cache: Option<&mut KvCache>,
    ) -> Result<(Self, Bundle<Tensor>), DeviceError> {
        let inputs: Bundle<Var> =
            inputs.into_iter().map(|(name, tensor)| (name, tape.input(tensor))).collect();
        let input_ids = inputs.iter().map(|(name, var)| (name, var.id())).collect();
        let recorder = tape.recorder(parameters);
        let mut pass =
            UnitContext { recorder, inputs, outputs: Bundle::new(), batch, taken: Bundle::new(), kv_cache };
        let done = unit.forward(&mut pass);
        let UnitContext { outputs, taken, .. } = pass;
        let ids = outputs.iter().map(|(name, var)| (name, var.id())).collect();
        let mut pass = UnitPass { tape, inputs: input_ids, outputs: ids, batch: taken };
        pass.return_batch(batch);
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
        for (name, &id) in self.batch.iter() {
            let tensor = batch.take(name).expect("a batch lives until its last reader's backward");
            self.tape.put_value(id, tensor);
        }
        let done = run(self);
        self.return_batch(batch);
        done
    }

    fn return_batch(&mut self, batch: &mut Batch) {
        for (name, &id) in self.batch.iter() {
            batch.push(name, self.tape.take_value(id));
        }
    }

    fn seeds(&self, grads: Bundle<Tensor>) -> impl Iterator<Item = (VarId, Tensor)> + use<> {
        let outputs = self.outputs.clone();
        grads
            .into_iter()
            .map(move |(name, grad)| (*outputs.get(name).expect("gradients are those of outputs"), grad))
    }

    /// Runs backward. `grads` are the gradients of the outputs.
    ///
    /// # Errors
    /// As [`Tape::backward`].
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
    ///
    /// # Errors
    /// As [`Tape::backward_input`].
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
    ///
    /// # Errors
    /// As [`Tape::backward_weight`].
    pub fn backward_weight(
        &mut self,
        parameters: &dyn ParameterSource,
        batch: &mut Batch,
        sink: &mut dyn GradSink,
    ) -> Result<(), DeviceError> {
        self.with_batch(batch, |pass| pass.tape.backward_weight(parameters, sink))
    }

    /// Takes the gradients of the inputs after backward, each in the dtype of its input. A gradient is zero if no operation read the input.
    ///
    /// # Errors
    /// As [`Tape::take_grad_or_zeros`].
    pub fn take_input_grads(&mut self) -> Result<Bundle<Tensor>, DeviceError> {
        let mut grads = Bundle::new();
        for (name, &id) in self.inputs.iter() {
            if self.tape.requires_grad(id) {
                grads.push(name, self.tape.take_grad_or_zeros(id)?);
            }
        }
        Ok(grads)
    }

    /// Takes the inputs off the tape, for another forward pass.
    pub fn take_inputs(&mut self) -> Bundle<Tensor> {
        self.inputs.iter().map(|(name, &id)| (name, self.tape.take_value(id))).collect()
    }

    /// Drops activations that are cheap to recompute. See [`Tape::free_recomputable`].
    pub fn keep_products(&mut self) {
        self.tape.free_recomputable();
    }

    /// Recomputes the activations that [`keep_products`](UnitPass::keep_products) dropped.
    ///
    /// # Errors
    /// As [`Tape::recompute`].
    pub fn recompute(
        &mut self,
        parameters: &dyn ParameterSource,
        batch: &mut Batch,
    ) -> Result<(), DeviceError> {
        self.with_batch(batch, |pass| pass.tape.recompute(parameters))
    }

    /// Calls `visit` with all tensors that the pass holds. See [`Tape::for_each_tensor`].
    pub fn for_each_tensor(&mut self, visit: impl FnMut(&mut Tensor)) {
        self.tape.for_each_tensor(visit);
    }

    pub(crate) fn num_bytes(&mut self) -> usize {
        let mut num_bytes = 0;
        self.for_each_tensor(|tensor| num_bytes += tensor.num_bytes());
        num_bytes
    }

    /// Returns the unit's contribution to the loss. It is available after forward if the tape does not record, and otherwise after
    /// backward.
    pub fn loss(&self) -> Option<&PendingMean> {
        self.tape.loss()
    }

    /// Returns the unit's metrics, after forward.
    pub fn metrics(&self) -> &[Metric] {
        self.tape.metrics()
    }

    /// Returns a mean that the unit has [reported](crate::MeanReport): a metric, or the loss if `metric` is `None`.
    pub fn reported(&self, metric: Option<&str>) -> Option<&PendingMean> {
        match metric {
            None => self.loss(),
            Some(name) => self.metrics().iter().find(|metric| metric.name == name).map(|metric| &metric.mean),
        }
    }

    /// Returns the tape, emptied, for another pass.
    pub fn into_tape(self) -> Tape {
        let mut tape = self.tape;
        tape.clear();
        tape
    }
}
