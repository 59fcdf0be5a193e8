//! Microbatches in flight: their batches, what passes from unit to unit, and what backward reads.

use crate::error::{ParallelError, Result};
use trireme_model::{Batch, BatchTensor, Bundle, Past, Rehearsal, TensorSpec, UnitPass};
use trireme_schedule::{Message, MessageKind, Outline};
use trireme_tensor::{Tape, Tensor};

/// What a unit's forward pass of one microbatch has left for its backward.
pub(super) enum Kept {
    Recorded(UnitPass),
    Input(Bundle<Tensor>),
    /// What the weight half of backward reads.
    Halved(UnitPass),
}

/// What units run for.
pub(super) enum Purpose {
    Training,
    /// Collects what units report.
    Evaluation(Reports),
    /// Continues the sequence of this past.
    Generation(Past),
}

/// What units report of one batch, in order.
pub(super) struct Reports {
    /// One f64 each, on the device.
    pub(super) sums: Tensor,
    pub(super) num_rows: Vec<usize>,
}

/// Microbatches under way.
pub(super) struct InFlight {
    pub(super) num_microbatches: usize,
    /// The step of the program that runs, or its first one.
    pub(super) first_step: u64,
    pub(super) num_samples: usize,
    pub(super) purpose: Purpose,
    /// By kind, then microbatch: what the last unit made, for the next one, and the gradient of what it read, for the one below.
    pub(super) passing: [Vec<Option<Bundle<Tensor>>>; 2],
    pub(super) batches: Vec<Batch>,
    /// By microbatch, then tensor of the batch: units on this rank that have not yet read it for the last time.
    pub(super) num_readers: Vec<usize>,
    /// By unit, then microbatch.
    pub(super) passes: Vec<Option<Kept>>,
    /// Tapes to be used again, so that steps allocate nothing.
    pub(super) spare_tapes: Vec<Tape>,
}

impl InFlight {
    pub(super) fn new(outline: &Outline, rehearsal: &Rehearsal) -> Self {
        let (num_units, num_microbatches) = (outline.chain.num_units, outline.num_microbatches);
        let none = || (0..num_microbatches).map(|_| None).collect();
        InFlight {
            num_microbatches,
            first_step: 0,
            num_samples: rehearsal.num_samples(),
            purpose: Purpose::Training,
            passing: [none(), none()],
            batches: (0..num_microbatches).map(|_| Batch::new()).collect(),
            num_readers: vec![0; num_microbatches * rehearsal.batch.len()],
            passes: (0..num_units * num_microbatches).map(|_| None).collect(),
            spare_tapes: Vec::with_capacity(num_units * num_microbatches),
        }
    }

    /// Takes in the tensors of a microbatch that units on this rank read.
    pub(super) fn begin(
        &mut self,
        microbatch: usize,
        mut batch: Batch,
        outline: &Outline,
        rehearsal: &Rehearsal,
    ) {
        self.num_samples = num_samples(&batch);
        let first = microbatch * rehearsal.batch.len();
        for (tensor, num_readers) in rehearsal.batch.iter().zip(&mut self.num_readers[first..]) {
            *num_readers = tensor.readers.iter().filter(|&&unit| outline.holds(unit)).count();
            if *num_readers == 0 {
                batch.take(tensor.spec.name);
            }
        }
        self.batches[microbatch] = batch;
        // The first unit reads the batch alone.
        *self.passing(MessageKind::Activation, microbatch) = outline.holds(0).then(Bundle::new);
    }

    /// A unit has read the batch for the last time.
    pub(super) fn end(&mut self, unit: usize, microbatch: usize, rehearsal: &Rehearsal) {
        let first = microbatch * rehearsal.batch.len();
        for (tensor, num_readers) in rehearsal.batch.iter().zip(&mut self.num_readers[first..]) {
            if tensor.readers.contains(&unit) {
                *num_readers -= 1;
                if *num_readers == 0 {
                    self.batches[microbatch].take(tensor.spec.name);
                }
            }
        }
    }

    /// What is in a message of activations or gradients.
    pub(super) fn carried<'a>(
        &self,
        Message { kind, unit, .. }: Message,
        rehearsal: &'a Rehearsal,
    ) -> impl Iterator<Item = TensorSpec> + use<'a> {
        let (num_samples, rehearsed) = (self.num_samples, rehearsal.num_samples());
        let are_grads = kind == MessageKind::Gradient;
        let outputs = &rehearsal.units[unit - usize::from(are_grads)].outputs;
        let specs = outputs.iter().map(move |spec| spec.with_samples(num_samples, rehearsed));
        specs.filter(move |spec| !are_grads || spec.has_grad())
    }

    /// Takes what passes from unit to unit: an activation that the unit below has made, or a gradient of the one above.
    pub(super) fn take(&mut self, kind: MessageKind, microbatch: usize) -> Bundle<Tensor> {
        self.passing(kind, microbatch).take().expect("the unit before has run")
    }

    pub(super) fn passing(&mut self, kind: MessageKind, microbatch: usize) -> &mut Option<Bundle<Tensor>> {
        &mut self.passing[kind as usize][microbatch]
    }

    pub(super) fn pass(&mut self, unit: usize, microbatch: usize) -> &mut Option<Kept> {
        &mut self.passes[unit * self.num_microbatches + microbatch]
    }
}

pub(super) fn num_samples(batch: &Batch) -> usize {
    batch.iter().next().map_or(1, |(_, tensor)| tensor.shape().dims()[0])
}

/// Refuses a batch whose tensors differ from the rehearsed ones in more than the number of samples.
pub(super) fn check_batch(batch: &Batch, rehearsal: &Rehearsal, num_samples: usize) -> Result<()> {
    for BatchTensor { spec, .. } in &rehearsal.batch {
        let found = batch.get(spec.name).map(|tensor| TensorSpec::of(spec.name, tensor));
        let expected = spec.with_samples(num_samples, rehearsal.num_samples());
        if found != Some(expected) {
            let found = found.map_or_else(|| "none".to_owned(), |spec| spec.to_string());
            return Err(ParallelError::OtherBatch { name: spec.name, found, expected: expected.to_string() });
        }
    }
    Ok(())
}
