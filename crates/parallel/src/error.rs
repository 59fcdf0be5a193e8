use trireme_base::Rank;
use trireme_comm::CommError;
use trireme_model::ModelError;
use trireme_schedule::ProgramError;
use trireme_tensor::DeviceError;

/// A step failed.
#[derive(Debug, thiserror::Error)]
pub enum ParallelError {
    /// The program must not run.
    #[error("the step program is not valid: {0}")]
    Program(#[from] ProgramError),
    /// The device refused.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The model refused.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Communication failed.
    #[error(transparent)]
    Comm(#[from] CommError),
    /// A program was given too few microbatches.
    #[error("the program runs {expected} microbatches, but only {found} were given")]
    TooFewMicrobatches {
        /// Microbatches of the program.
        expected: usize,
        /// Microbatches given.
        found: usize,
    },
    /// Loss or gradients became infinite or NaN; parameters are as before the step.
    #[error(
        "step {step}: the {what} is {value}; parameters were left as before the step. Try a lower [optimizer] lr, a longer \
         [lr_scheduler] warmup_steps, or [training] max_norm"
    )]
    NotFinite {
        /// The step.
        step: u64,
        /// "loss" or "gradient norm".
        what: &'static str,
        /// Its value.
        value: f64,
    },
    /// Replicas that should be equal are not.
    #[error(
        "the parameters of rank {rank} differ from those of rank 0 ({found:016x} instead of {expected:016x}): the ranks loaded \
         different weights, or run different binaries"
    )]
    ReplicasDiffer {
        /// The rank that differs.
        rank: Rank,
        /// Hash of its parameters.
        found: u64,
        /// Hash of rank 0's.
        expected: u64,
    },
}
