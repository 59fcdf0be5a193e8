//! What a compressor takes, known before there is one.

use super::compression::Method;
use super::{Bucket, Compression, Round, low_rank, random_k};

/// What a compressor takes of a rank's memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompressorSizes {
    /// Bytes of what is kept from step to step, and into checkpoints: residual, velocity, factors, second moment.
    pub state_bytes: usize,
    /// Bytes that its codec works with besides.
    pub scratch_bytes: usize,
    /// The rounds of each kind of step that there is, in the order of the steps; for their messages, the caller has memory.
    pub rounds: Vec<Vec<Round>>,
}

impl Compression {
    /// What a compressor of `bucket` takes; `None` if it would send the gradient of each step as it is, and keep nothing.
    ///
    /// Cost: some operations for each matrix of the bucket and each ratio of the warm-up; no memory like that of the bucket.
    pub fn sizes(&self, bucket: &Bucket, world_size: usize) -> Option<CompressorSizes> {
        let has_codec = self.has_codec(bucket, world_size);
        let residual_len = if has_codec && self.error_feedback() { bucket.len() } else { 0 };
        let (kept_len, scratch_bytes) = if has_codec { self.codec_sizes(bucket) } else { (0, 0) };
        let moment_len = if self.normalize().is_some() { bucket.len() } else { 0 };
        let state_bytes = (residual_len + kept_len + moment_len) * size_of::<f32>();
        if state_bytes == 0 && !self.is_ever_compressed(bucket, world_size) {
            return None;
        }
        let rounds = self.changing_steps().into_iter().map(|step| self.rounds(bucket, world_size, step));
        let mut rounds: Vec<_> = rounds.collect();
        rounds.dedup();
        Some(CompressorSizes { state_bytes, scratch_bytes, rounds })
    }

    /// Whether the codec has a part in any step of a bucket. Momentum has, even uncompressed, for it replaces the optimizer's.
    pub(super) fn has_codec(&self, bucket: &Bucket, world_size: usize) -> bool {
        let has_momentum = matches!(self.method, Method::TopK { momentum, .. } if momentum > 0.0);
        has_momentum || self.is_ever_compressed(bucket, world_size)
    }

    /// What is compressed in one step stays so, so the last step tells of all.
    fn is_ever_compressed(&self, bucket: &Bucket, world_size: usize) -> bool {
        self.uncompressed_reason(bucket, world_size, u64::MAX).is_none()
    }

    /// Elements that the codec keeps, and bytes that it works with.
    fn codec_sizes(&self, bucket: &Bucket) -> (usize, usize) {
        match self.method {
            Method::TopK { momentum, .. } if momentum > 0.0 => (bucket.len(), 0),
            Method::RandomK { .. } => (0, random_k::scratch_bytes(bucket.len())),
            Method::LowRank { rank } => low_rank::Layout::new(bucket, rank).sizes(),
            _ => (0, 0),
        }
    }
}
