//! Microbatches in flight: their batches, the tensors that pass between units, and the activations kept for backward.

use crate::error::{ParallelError, Result};
use trireme_model::{Batch, BatchTensor, Bundle, KvCache, ModelProfile, TensorSpec, UnitPass};
use trireme_schedule::{Message, MessageKind, ProgramHeader};
use trireme_tensor::{Tape, Tensor};

/// The part of a unit's forward pass of one microbatch that is kept for its backward.
pub(super) enum Kept {
    Recorded(UnitPass),
    Input(Bundle<Tensor>),
    /// A pass whose input half of backward has run. It holds the tensors that the weight half reads.
    InputHalfDone(UnitPass),
}

/// Whether units run for training, evaluation or generation.
pub(super) enum Purpose {
    Training,
    /// Evaluation: collects the reports of units.
    Evaluation(Reports),
    /// Generation: continues the sequence of this KV cache.
    Generation(KvCache),
}

/// The losses and metrics that units report for one batch, in order.
pub(super) struct Reports {
    /// One f64 for each report, on the device.
    pub(super) sums: Tensor,
    pub(super) num_rows: Vec<usize>,
}

/// The microbatches in flight, and the state of their passes.
pub(super) struct InFlight {
    pub(super) num_microbatches: usize,
    /// Number of the first step of the running program.
    pub(super) first_step: u64,
    pub(super) num_samples: usize,
    pub(super) purpose: Purpose,
    /// For each kind of message and microbatch: the activations that a unit has passed on to the next one, or the gradients that it has
    /// passed back to the previous one.
    pub(super) between_units: [Vec<Option<Bundle<Tensor>>>; 2],
    pub(super) batches: Vec<Batch>,
    /// For each microbatch and tensor of the batch: the number of units on this rank that will still read it.
    pub(super) num_readers: Vec<usize>,
    /// The kept passes, by unit and then by microbatch.
    pub(super) kept: Vec<Option<Kept>>,
    /// Tapes for reuse, so that steps do not allocate.
    pub(super) spare_tapes: Vec<Tape>,
}

impl InFlight {
    pub(super) fn new(header: &ProgramHeader, profile: &ModelProfile) -> Self {
        let (num_units, num_microbatches) = (header.chain.num_units, header.num_microbatches);
        let none = || (0..num_microbatches).map(|_| None).collect();
        InFlight {
            num_microbatches,
            first_step: 0,
            num_samples: profile.num_samples(),
            purpose: Purpose::Training,
            between_units: [none(), none()],
            batches: (0..num_microbatches).map(|_| Batch::new()).collect(),
            num_readers: vec![0; num_microbatches * profile.batch.len()],
            kept: (0..num_units * num_microbatches).map(|_| None).collect(),
            spare_tapes: Vec::with_capacity(num_units * num_microbatches),
        }
    }

    /// Stores the tensors of a microbatch that units on this rank read.
    pub(super) fn begin(
        &mut self,
        microbatch: usize,
        mut batch: Batch,
        header: &ProgramHeader,
        profile: &ModelProfile,
    ) {
        self.num_samples = num_samples(&batch);
        let first = microbatch * profile.batch.len();
        for (tensor, num_readers) in profile.batch.iter().zip(&mut self.num_readers[first..]) {
            *num_readers = tensor.readers.iter().filter(|&&unit| header.holds(unit)).count();
            if *num_readers == 0 {
                batch.take(tensor.spec.name);
            }
        }
        self.batches[microbatch] = batch;
        // The first unit reads only the batch.
        *self.between_units_slot(MessageKind::Activation, microbatch) = header.holds(0).then(Bundle::new);
    }

    /// Records that a unit has read the batch for the last time, and frees tensors without further readers.
    pub(super) fn release_batch_tensors(&mut self, unit: usize, microbatch: usize, profile: &ModelProfile) {
        let first = microbatch * profile.batch.len();
        for (tensor, num_readers) in profile.batch.iter().zip(&mut self.num_readers[first..]) {
            if tensor.readers.contains(&unit) {
                *num_readers -= 1;
                if *num_readers == 0 {
                    self.batches[microbatch].take(tensor.spec.name);
                }
            }
        }
    }

    /// Returns the specs of the tensors in a message of activations or gradients.
    pub(super) fn message_specs<'a>(
        &self,
        Message { kind, unit, .. }: Message,
        profile: &'a ModelProfile,
    ) -> impl Iterator<Item = TensorSpec> + use<'a> {
        let (num_samples, profile_samples) = (self.num_samples, profile.num_samples());
        let are_grads = kind == MessageKind::Gradient;
        let outputs = &profile.units[unit - usize::from(are_grads)].outputs;
        let specs = outputs.iter().map(move |spec| spec.with_samples(num_samples, profile_samples));
        specs.filter(move |spec| !are_grads || spec.has_grad())
    }

    /// Takes the tensors that pass between units: activations of the previous unit, or gradients from the next one.
    pub(super) fn take(&mut self, kind: MessageKind, microbatch: usize) -> Bundle<Tensor> {
        self.between_units_slot(kind, microbatch).take().expect("the unit before has run")
    }

    pub(super) fn between_units_slot(
        &mut self,
        kind: MessageKind,
        microbatch: usize,
    ) -> &mut Option<Bundle<Tensor>> {
        &mut self.between_units[kind as usize][microbatch]
    }

    pub(super) fn kept_slot(&mut self, unit: usize, microbatch: usize) -> &mut Option<Kept> {
        &mut self.kept[unit * self.num_microbatches + microbatch]
    }
}

pub(super) fn num_samples(batch: &Batch) -> usize {
    batch.iter().next().map_or(1, |(_, tensor)| tensor.shape().dims()[0])
}

/// Returns an error if the tensors of a batch differ from the tensors of `profile` in more than the number of samples.
pub(super) fn check_batch(batch: &Batch, profile: &ModelProfile, num_samples: usize) -> Result<()> {
    for BatchTensor { spec, .. } in &profile.batch {
        let found = batch.get(spec.name).map(|tensor| TensorSpec::of(spec.name, tensor));
        let expected = spec.with_samples(num_samples, profile.num_samples());
        if found != Some(expected) {
            let found = found.map_or_else(|| "none".to_owned(), |spec| spec.to_string());
            return Err(ParallelError::BatchMismatch {
                name: spec.name,
                found,
                expected: expected.to_string(),
            });
        }
    }
    Ok(())
}
