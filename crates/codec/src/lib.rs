//! Gradient compression: codecs that turn a bucket of gradients into messages for a collective and decode its result.
//!
//! The crate only computes: it does not communicate and starts no threads. A [`Compressor`] holds the state of one
//! bucket and determines the [`Round`]s of each step. In each round, the caller provides memory for this rank's
//! message, performs the collective, and passes the result back. The length of a round's messages is known in advance
//! and equal on all ranks. After the last round, all ranks hold bit-identical results. `docs/compression.md` compares
//! the codecs.
//!
//! # Invariants
//! - If a rank's gradient contains NaN or infinity, so does the result on every rank.
//! - The state that a rank carries to later steps (residual, velocity, factors, second moment) is finite for any input.
//! - Gathered messages are summed in rank order. Other sums are computed by the all-reduce, in its order.
//! - Any bytes of the right length can be decoded: to numbers or to an error.

mod bucket;
mod cast;
mod codec_name;
mod compression;
mod compressor;
mod error;
mod fp8;
mod low_rank;
mod normalizer;
mod one_bit;
mod quantized;
mod random_k;
mod round;
mod sizes;
mod state;
#[cfg(test)]
mod tests;
mod top_k;
mod vector_ops;

pub use bucket::{Bucket, Matrix};
pub use codec_name::CodecName;
pub use compression::{Compression, CompressionOptions, UncompressedReason};
pub use compressor::{CompressionStatistics, Compressor};
pub use error::CompressionError;
use error::Result;
pub use round::Round;
pub use sizes::CompressorSizes;
pub use state::{StateCopy, StateValues};

use trireme_base::RandomKey;

/// A compression algorithm for one bucket. Messages are byte slices that are aligned for the dtype of their [`Round`].
trait Codec: Send + Sync + std::fmt::Debug {
    /// Adds the gradient of a step to the residual of earlier steps.
    fn accumulate(&mut self, residual: &mut [f32], gradient: &[f32]) {
        for (residual, gradient) in residual.iter_mut().zip(gradient) {
            *residual += gradient;
        }
    }

    /// Writes this rank's message of a round. After the last round, `values` holds the compression error.
    fn encode(&mut self, context: &RoundContext, values: &mut [f32], message: &mut [u8]);

    /// Decodes the result of a round: the sum of all messages, or all messages in rank order. After the last round,
    /// `gradient` holds the sum over all ranks.
    fn decode(&mut self, context: &RoundContext, result: &[u8], gradient: &mut [f32]) -> Result<()>;

    /// The codec's own state that is carried from step to step, with its name. The residual is not part of it.
    fn own_state(&self) -> Option<(&'static str, &[f32])> {
        None
    }

    fn own_state_mut(&mut self) -> Option<(&'static str, &mut [f32])> {
        None
    }

    /// Adapts the state to gradients that are `factor` times larger from now on.
    fn rescale(&mut self, _factor: f32) {}
}

/// The step, round and rank for which a codec is called.
#[derive(Debug, Clone, Copy)]
struct RoundContext {
    step: u64,
    /// Index of the round within the step, from 0.
    round: usize,
    rank: usize,
    world_size: usize,
    /// Key of the bucket's random numbers, the same on all ranks.
    key: RandomKey,
}
