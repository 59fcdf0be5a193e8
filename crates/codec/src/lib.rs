//! Compression of reductions: what a bucket of gradients is turned into before it travels, and back.
//!
//! Everything here is a function of memory: no socket, no group, no thread. A [`Compressor`] keeps the state of one
//! bucket and says which [`Round`]s a step has; the caller gives it memory to write a message into, carries the message
//! out, and gives it what came back. All messages of a round have the same length on all ranks, which is known before,
//! and after the last round all ranks have the same bits. `docs/compression.md` compares the codecs.
//!
//! # Invariants
//! - A gradient's NaN or infinity reaches the result of every rank as NaN or infinity.
//! - What a rank keeps for later steps (residual, velocity, factors, second moment) is finite, whatever it was given.
//! - Sums over gathered messages go in rank order; all else is summed by the all-reduce, in its order.
//! - Any bytes of the right length can be read: they give numbers, or an error.

mod bucket;
mod cast;
mod codec_name;
mod compression;
mod compressor;
mod error;
mod fp8;
mod low_rank;
mod normalizer;
mod numbers;
mod one_bit;
mod quantized;
mod random_k;
mod round;
mod sizes;
mod state;
#[cfg(test)]
mod tests;
mod top_k;

pub use bucket::{Bucket, Matrix};
pub use codec_name::CodecName;
pub use compression::{Compression, CompressionOptions, UncompressedReason};
pub use compressor::{CompressionStatistics, Compressor};
pub use error::CompressionError;
pub use round::Round;
pub use sizes::CompressorSizes;
pub use state::{StateCopy, StateValues};

use trireme_base::RandomKey;

/// One way to send a bucket. Its messages are bytes, aligned for the dtype of their [`Round`].
trait Codec: Send + Sync + std::fmt::Debug {
    /// Adds a step's gradient to what earlier steps have left.
    fn accumulate(&mut self, residual: &mut [f32], gradient: &[f32]) {
        for (residual, gradient) in residual.iter_mut().zip(gradient) {
            *residual += gradient;
        }
    }

    /// Writes this rank's message of a round. The last round leaves in `values` what the messages do not say: the error.
    fn encode(&mut self, turn: &Turn, values: &mut [f32], message: &mut [u8]);

    /// Reads the result of a round: the sum of all messages, or all in rank order. The last round gives the sum of all values.
    fn decode(&mut self, turn: &Turn, result: &[u8], gradient: &mut [f32]) -> Result<(), CompressionError>;

    /// What the codec keeps from step to step, beside the residual.
    fn kept(&self) -> Option<(&'static str, &[f32])> {
        None
    }

    fn kept_mut(&mut self) -> Option<(&'static str, &mut [f32])> {
        None
    }

    /// Gradients will be `factor` times larger than before.
    fn rescale(&mut self, _factor: f32) {}
}

/// Where in a run a codec is called.
#[derive(Debug, Clone, Copy)]
struct Turn {
    step: u64,
    /// Of the step, from 0.
    round: usize,
    rank: usize,
    world_size: usize,
    /// The bucket's random numbers; the same on all ranks.
    key: RandomKey,
}
