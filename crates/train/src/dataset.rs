//! Where samples come from.

use crate::error::TrainError;
use trireme_data::{Sampler, TokenFile};
use trireme_model::{Batch, TARGETS, TOKENS, TensorSpec, empty_batch, token_specs};
use trireme_tensor::Device;

/// Samples, addressed by their index in the run.
///
/// The index is all that decides which sample it is, so any rank reads any sample, and a run resumes from the number of samples
/// that it has read.
pub trait Dataset: Send {
    /// The tensors of a batch of so many samples, which lie along dim 0.
    fn specs(&self, num_samples: usize) -> Vec<TensorSpec>;

    /// Samples of one pass over the data. Indices go on beyond it, in a next pass.
    fn num_samples(&self) -> u64;

    /// Writes the sample of this index.
    ///
    /// # Errors
    /// If it cannot be read.
    fn read(&mut self, index: u64, sample: &mut Sample<'_>) -> Result<(), TrainError>;
}

/// A sample to be written: its part of each tensor of a batch.
#[derive(Debug)]
pub struct Sample<'a> {
    batch: &'a mut Batch,
    row: usize,
}

impl Sample<'_> {
    /// The sample's elements of the f32 tensor of this name.
    ///
    /// # Panics
    /// If there is no such tensor, or it has another type.
    pub fn f32s(&mut self, name: &str) -> &mut [f32] {
        bytemuck::cast_slice_mut(self.bytes(name))
    }

    /// The sample's elements of the u32 tensor of this name.
    ///
    /// # Panics
    /// If there is no such tensor, or it has another type.
    pub fn u32s(&mut self, name: &str) -> &mut [u32] {
        bytemuck::cast_slice_mut(self.bytes(name))
    }

    fn bytes(&mut self, name: &str) -> &mut [u8] {
        let tensor = self.batch.get_mut(name).unwrap_or_else(|| panic!("a batch has no '{name}'"));
        let len = tensor.num_bytes() / tensor.shape().dims()[0];
        &mut tensor.bytes_mut()[self.row * len..][..len]
    }
}

/// Reads a batch of these tensors: the samples from `first` on, as many as the tensors have.
///
/// # Errors
/// If there is no memory for it, or a sample cannot be read.
pub(crate) fn read_batch(
    dataset: &mut dyn Dataset,
    device: &Device,
    specs: &[TensorSpec],
    first: u64,
) -> Result<Batch, TrainError> {
    let mut batch = empty_batch(device, specs)?;
    for row in 0..specs.first().map_or(0, |spec| spec.shape.dims()[0]) {
        dataset.read(first + row as u64, &mut Sample { batch: &mut batch, row })?;
    }
    Ok(batch)
}

/// Windows of a token file, for models that predict the next token.
#[derive(Debug)]
pub(crate) struct TokenWindows {
    tokens: TokenFile,
    sampler: Sampler,
    window: Vec<u32>,
}

impl TokenWindows {
    /// Windows of `seq_len` tokens and the one that follows, in an order that depends on the seed.
    pub(crate) fn shuffled(tokens: TokenFile, seq_len: usize, seed: u64) -> Result<Self, TrainError> {
        let sampler = Sampler::shuffled(tokens.num_tokens(), seq_len, seed)?;
        Ok(TokenWindows { tokens, sampler, window: vec![0; seq_len + 1] })
    }

    /// The same in the order of the file.
    pub(crate) fn sequential(tokens: TokenFile, seq_len: usize) -> Result<Self, TrainError> {
        let sampler = Sampler::sequential(tokens.num_tokens(), seq_len)?;
        Ok(TokenWindows { tokens, sampler, window: vec![0; seq_len + 1] })
    }

    /// The file.
    pub(crate) fn tokens(&self) -> &TokenFile {
        &self.tokens
    }
}

impl Dataset for TokenWindows {
    fn specs(&self, num_samples: usize) -> Vec<TensorSpec> {
        token_specs(num_samples, self.window.len() - 1)
    }

    fn num_samples(&self) -> u64 {
        self.sampler.num_windows()
    }

    fn read(&mut self, index: u64, sample: &mut Sample<'_>) -> Result<(), TrainError> {
        self.tokens.read_window(self.sampler.window(index).start, &mut self.window)?;
        let seq_len = self.window.len() - 1;
        sample.u32s(TOKENS).copy_from_slice(&self.window[..seq_len]);
        sample.u32s(TARGETS).copy_from_slice(&self.window[1..]);
        Ok(())
    }
}
