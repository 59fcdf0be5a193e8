//! The memory of a compressor, computed without creating it.

use super::compression::CodecConfig;
use super::{Bucket, Compression, Round, low_rank, random_k};

/// The memory that a compressor takes on one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompressorSizes {
    /// Bytes of the state that is carried from step to step and saved in checkpoints: residual, velocity, factors,
    /// second moment.
    pub state_bytes: usize,
    /// Bytes of the codec's scratch memory.
    pub scratch_bytes: usize,
    /// The rounds of step 0, and then the rounds after each change by the warm-up. The caller provides the memory for
    /// their messages.
    pub rounds: Vec<Vec<Round>>,
}

impl Compression {
    /// Computes the memory of a compressor of `bucket`; `None` if the compressor would send every gradient unchanged
    /// and hold no state.
    ///
    /// Cost: a few operations for each matrix of the bucket and each ratio of the warm-up. No memory proportional to
    /// the bucket is allocated.
    pub fn sizes(&self, bucket: &Bucket, world_size: usize) -> Option<CompressorSizes> {
        let has_codec = self.needs_codec(bucket, world_size);
        let residual_len = if has_codec && self.error_feedback() { bucket.len() } else { 0 };
        let (codec_state_len, scratch_bytes) = if has_codec { self.codec_sizes(bucket) } else { (0, 0) };
        let moment_len = if self.normalize().is_some() { bucket.len() } else { 0 };
        let state_bytes = (residual_len + codec_state_len + moment_len) * size_of::<f32>();
        if state_bytes == 0 && !self.is_ever_compressed(bucket, world_size) {
            return None;
        }
        let rounds = self.changing_steps().into_iter().map(|step| self.rounds(bucket, world_size, step));
        let mut rounds: Vec<_> = rounds.collect();
        rounds.dedup();
        Some(CompressorSizes { state_bytes, scratch_bytes, rounds })
    }

    /// Whether any step of a bucket needs the codec. A codec with momentum is needed even if nothing is compressed,
    /// because its momentum replaces that of the optimizer.
    pub(super) fn needs_codec(&self, bucket: &Bucket, world_size: usize) -> bool {
        let has_momentum = matches!(self.config, CodecConfig::TopK { momentum, .. } if momentum > 0.0);
        has_momentum || self.is_ever_compressed(bucket, world_size)
    }

    /// Returns whether any step is compressed. Checks only the last step, because a bucket that is compressed in one step
    /// is compressed in all later ones.
    fn is_ever_compressed(&self, bucket: &Bucket, world_size: usize) -> bool {
        self.uncompressed_reason(bucket, world_size, u64::MAX).is_none()
    }

    /// Returns the number of elements of the codec's state, and the bytes of its scratch memory.
    fn codec_sizes(&self, bucket: &Bucket) -> (usize, usize) {
        match self.config {
            CodecConfig::TopK { momentum, .. } if momentum > 0.0 => (bucket.len(), 0),
            CodecConfig::RandomK { .. } => (0, random_k::scratch_bytes(bucket.len())),
            CodecConfig::LowRank { rank } => low_rank::Layout::new(bucket, rank).sizes(),
            _ => (0, 0),
        }
    }
}
