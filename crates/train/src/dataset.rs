//! Where samples come from.

use crate::error::TrainError;
use std::collections::BTreeMap;
use trireme_base::{ContextPlace, DType};
use trireme_model::{Batch, HostBatch, TensorSpec};
use trireme_tensor::Device;

/// Samples, addressed by their index in the run.
///
/// The index is all that decides which sample it is, so any rank reads any sample, and a run resumes from the number of samples
/// that it has read.
pub trait Dataset: Send {
    /// The tensors of one sample. In a batch each has one more dim, the first, of the samples.
    fn sample(&self) -> Vec<TensorSpec>;

    /// Samples of one pass over the data. [`read`](Dataset::read) receives indices beyond it: those of later passes.
    fn num_samples(&self) -> u64;

    /// Tokens of one sample. With `Some`, progress is shown in tokens; with `None`, in samples.
    fn tokens_per_sample(&self) -> Option<u64> {
        None
    }

    /// What decides, beside the seed, which sample an index is, by name: a checksum of the files, for example. Checkpoints state
    /// it, all ranks must agree on it, and a run whose samples have another identity does not resume.
    fn identity(&self) -> BTreeMap<String, String> {
        BTreeMap::from([("num_samples".to_owned(), self.num_samples().to_string())])
    }

    /// Announces that the samples read next are those of one mean, `num_samples` from index `first` on: of a step, of all ranks, or of a validation.
    /// A dataset that weighs parts of samples can divide by what all of them weigh. Returns whether anything in them counts in the loss. If
    /// nothing does, a step is skipped, and a validation has no result.
    ///
    /// # Errors
    /// As [`read`](Dataset::read).
    fn begin(&mut self, _first: u64, _num_samples: u64) -> Result<bool, TrainError> {
        Ok(true)
    }

    /// Writes the sample of this index of the run. Without an order of its own, a dataset reads `index % num_samples()`;
    /// [`Shuffle`](trireme_data::Shuffle) gives each pass another random order.
    ///
    /// # Errors
    /// If it cannot be read: [`TrainError::Samples`] with the reason.
    fn read(&mut self, index: u64, sample: &mut Sample<'_>) -> Result<(), TrainError>;
}

/// A sample to be written: its part of each tensor of a batch.
#[derive(Debug)]
pub struct Sample<'a> {
    pub(crate) batch: &'a mut HostBatch,
    pub(crate) row: usize,
}

impl Sample<'_> {
    /// The sample's elements of the f32 tensor of this name.
    ///
    /// # Panics
    /// If there is no such tensor, or it has another type.
    pub fn f32s(&mut self, name: &str) -> &mut [f32] {
        bytemuck::cast_slice_mut(self.batch.sample_mut(name, self.row, DType::F32))
    }

    /// The sample's elements of the u32 tensor of this name.
    ///
    /// # Panics
    /// If there is no such tensor, or it has another type.
    pub fn u32s(&mut self, name: &str) -> &mut [u32] {
        bytemuck::cast_slice_mut(self.batch.sample_mut(name, self.row, DType::U32))
    }
}

pub(crate) fn batch_specs(dataset: &dyn Dataset, num_samples: usize) -> Vec<TensorSpec> {
    dataset.sample().into_iter().map(|spec| spec.in_batch(num_samples)).collect()
}

/// Reads the samples from `first` on, as many as `batch` has, and copies the positions that this rank has of them to the device.
/// Fails if there is no memory for them, or a sample cannot be read.
pub(crate) fn read_batch(
    dataset: &mut dyn Dataset,
    device: &Device,
    batch: &mut HostBatch,
    first: u64,
    context: ContextPlace,
) -> Result<Batch, TrainError> {
    for row in 0..batch.num_samples() {
        dataset.read(first + row as u64, &mut Sample { batch, row })?;
    }
    Ok(batch.upload_positions(device, context)?)
}
