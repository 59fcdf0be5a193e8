//! Datasets: the sources of samples.

use crate::error::TrainError;
use std::collections::BTreeMap;
use trireme_base::{ContextRank, DType};
use trireme_model::{Batch, HostBatch, TensorSpec};
use trireme_tensor::Device;

/// Samples, addressed by their index in the run.
///
/// The index alone determines the sample. So any rank can read any sample, and a run resumes from the number of samples that it has read.
pub trait Dataset: Send {
    /// Returns the tensors of one sample. In a batch, each tensor has one more dim, the first, whose size is the number of samples.
    fn sample(&self) -> Vec<TensorSpec>;

    /// Returns the number of samples in one pass over the data. [`read`](Dataset::read) also receives larger indices, which belong to later
    /// passes.
    fn num_samples(&self) -> u64;

    /// Returns the number of tokens per sample. Progress is shown in tokens if it is `Some`, otherwise in samples.
    fn tokens_per_sample(&self) -> Option<u64> {
        None
    }

    /// Returns, by name, the properties that determine which sample an index refers to, apart from the seed: a checksum of the files, for
    /// example. Checkpoints state them, all ranks must agree on them, and a run does not resume if they differ.
    fn identity(&self) -> BTreeMap<String, String> {
        BTreeMap::from([("num_samples".to_owned(), self.num_samples().to_string())])
    }

    /// Announces the samples over which the next mean loss is taken: `num_samples` samples from index `first` on. They are the samples of a
    /// step on all ranks, or of a validation. A dataset that weights parts of samples can normalize the weights by their sum. Returns
    /// whether any part contributes to the loss. If none does, a step is skipped, and a validation has no result.
    ///
    /// # Errors
    /// The errors of [`read`](Dataset::read).
    fn announce_samples(&mut self, _first: u64, _num_samples: u64) -> Result<bool, TrainError> {
        Ok(true)
    }

    /// Writes the sample with this index in the run. A dataset without an order of its own reads `index % num_samples()`.
    /// [`Shuffle`](trireme_data::Shuffle) gives each pass another random order.
    ///
    /// # Errors
    /// [`TrainError::Samples`] with the reason if the sample cannot be read.
    fn read(&mut self, index: u64, sample: &mut Sample<'_>) -> Result<(), TrainError>;
}

/// A sample to write: one row of each tensor of a batch.
#[derive(Debug)]
pub struct Sample<'a> {
    pub(crate) batch: &'a mut HostBatch,
    pub(crate) row: usize,
}

impl Sample<'_> {
    /// Returns the sample's elements of the f32 tensor `name`.
    ///
    /// # Panics
    /// If there is no such tensor, or it has another type.
    pub fn f32s(&mut self, name: &str) -> &mut [f32] {
        bytemuck::cast_slice_mut(self.batch.sample_mut(name, self.row, DType::F32))
    }

    /// Returns the sample's elements of the u32 tensor `name`.
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

/// Reads consecutive samples from `first` on, as many as `batch` has, and copies this rank's positions of them to the device. Fails if the
/// device has no memory for them, or if a sample cannot be read.
pub(crate) fn read_batch(
    dataset: &mut dyn Dataset,
    device: &Device,
    batch: &mut HostBatch,
    first: u64,
    context: ContextRank,
) -> Result<Batch, TrainError> {
    for row in 0..batch.num_samples() {
        dataset.read(first + row as u64, &mut Sample { batch, row })?;
    }
    Ok(batch.upload_positions(device, context)?)
}
