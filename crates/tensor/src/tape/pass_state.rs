//! Precision, axes, position and random key of one pass.

use super::PassAxes;
use crate::fp8::Fp8Scales;
use crate::precision::Precision;
use std::sync::Arc;

/// The part of the key of random numbers that all operations of a pass share. It is the same for every parallel layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Randomness {
    /// The run's seed.
    pub seed: u64,
    /// The step.
    pub step: u64,
    /// The first sample of the microbatch, counted over the microbatches of all ranks in the step.
    pub first_sample: u64,
    /// Samples of the microbatch.
    pub num_samples: usize,
}

/// Precision, axes, position and random key of one pass. The caller of [`Tape::new`](super::Tape::new) provides it.
#[derive(Debug, Clone)]
pub struct PassState {
    /// Precision of matmuls and activations.
    pub precision: Precision,
    /// Scales of the linear layers that compute in fp8. A recording tape also writes their amaxes.
    pub fp8: Option<Arc<Fp8Scales>>,
    /// The axes of the pass.
    pub axes: PassAxes,
    /// Position of the first token of each sequence.
    pub first_position: usize,
    /// The key of random operations.
    pub randomness: Randomness,
    /// Factor of every gradient of a backward pass that starts from a loss. The loss itself is not multiplied.
    pub loss_scale: f32,
}

impl From<Precision> for PassState {
    /// A pass of one rank, without fp8, at position 0.
    fn from(precision: Precision) -> Self {
        PassState {
            precision,
            fp8: None,
            axes: PassAxes::default(),
            first_position: 0,
            randomness: Randomness::default(),
            loss_scale: 1.0,
        }
    }
}
