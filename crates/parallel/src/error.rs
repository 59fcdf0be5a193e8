use crate::step::NonFinite;
use trireme_base::Rank;
use trireme_codec::CompressionError;
use trireme_comm::CommError;
use trireme_model::ModelError;
use trireme_schedule::ProgramError;
use trireme_swap::SwapError;
use trireme_tensor::{DeviceError, OverBudget};

/// A result whose error type defaults to [`ParallelError`].
pub(crate) type Result<T, E = ParallelError> = std::result::Result<T, E>;

/// The error of a step, or of another operation of an executor.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "messages explain the fields")]
pub enum ParallelError {
    #[error("invalid step program: {0}")]
    Program(#[from] ProgramError),
    #[error(transparent)]
    Device(DeviceError),
    #[error("{line}: {source}")]
    OverBudget {
        line: String,
        #[source]
        source: OverBudget,
    },
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Comm(#[from] CommError),
    /// A compression that is not possible, or a compressed message that cannot be decoded.
    #[error(transparent)]
    Compression(#[from] CompressionError),
    #[error(
        "tensor '{name}' of a microbatch: found {found}, expected {expected}, as in the dry run of the model"
    )]
    BatchMismatch { name: &'static str, found: String, expected: String },
    #[error("cannot store state on disk")]
    Swap(#[from] SwapError),
    #[error(
        "the hosts of replica {replica} have {ranks:?} of its ranks, but ZeRO++ needs the same number on each host"
    )]
    UnevenRanksPerHost { replica: usize, ranks: Vec<usize> },
    #[error(
        "replica {replica} is on {num_hosts} hosts, but replica 0 on {expected}, and ZeRO++ needs all to be spread alike"
    )]
    DifferentHostCounts { replica: usize, num_hosts: usize, expected: usize },
    #[error(
        "'{parameter}' balances experts by how often each was chosen, and gradients that are rounded beside such counts would be lost; \
         do not quantize gradients"
    )]
    QuantizedLoadCounts { parameter: String },
    /// A rank has no batch to evaluate, but ranks with other experts wait for its tokens.
    #[error(
        "a rank without a batch cannot run a model whose experts are on several ranks; give it any batch, and leave out its losses"
    )]
    NoBatch,
    #[error("the program runs {expected} microbatches, but only {found} were given")]
    TooFewMicrobatches { expected: usize, found: usize },
    #[error(
        "step {step}: the {what} is {value}; {}",
        if *.may_have_updated {
"some parameters may have been updated since, so resume from the last checkpoint"
} else {
"parameters are unchanged since the previous step"
}
    )]
    NotFinite {
        step: u64,
        what: NonFinite,
        value: f64,
        /// Whether some parameters may already have been updated, because updates do not wait for the end of the step. If false,
        /// parameters are as before the step.
        may_have_updated: bool,
    },
    /// The loss or the gradient norm became infinite or NaN, and the loss scale cannot decrease further. Parameters are as before the step.
    #[error(
        "step {step}: the {what} is {value} in f16; the loss scale of {loss_scale} cannot decrease further, after \
         {skipped_steps} skipped steps. Parameters are unchanged since the previous step"
    )]
    LossScaleExhausted {
        step: u64,
        what: NonFinite,
        value: f64,
        /// The loss scale: the smallest dynamic one, or the static one.
        loss_scale: u32,
        skipped_steps: u64,
    },
    /// Ranks whose parameters should be equal have different ones: data-parallel replicas, or ranks that hold the same parameters along the
    /// tensor or expert axis.
    #[error(
        "the parameters of rank {rank} differ from those of rank {other} ({found:016x} instead of {expected:016x}): \
         the ranks loaded different weights, or run different binaries"
    )]
    ReplicasDiffer {
        rank: Rank,
        found: u64,
        /// The first rank of the group whose parameters should be equal.
        other: Rank,
        expected: u64,
    },
}

/// Unwraps the error of an exchange within a unit, which operations pass on as a [`DeviceError`].
impl From<DeviceError> for ParallelError {
    fn from(error: DeviceError) -> Self {
        match error {
            DeviceError::Exchange(source) => match source.downcast() {
                Ok(error) => *error,
                Err(source) => ParallelError::Device(DeviceError::Exchange(source)),
            },
            error => ParallelError::Device(error),
        }
    }
}

/// Wraps an error, so that operations of a unit can pass it on.
impl From<ParallelError> for DeviceError {
    fn from(error: ParallelError) -> Self {
        match error {
            ParallelError::Device(error) => error,
            error => DeviceError::Exchange(Box::new(error)),
        }
    }
}

impl From<OverBudget> for ParallelError {
    fn from(error: OverBudget) -> Self {
        ParallelError::Device(DeviceError::OverBudget(error))
    }
}

impl ParallelError {
    /// Adds the line of the program at which memory was exhausted. Other errors are unchanged.
    pub(crate) fn at(self, line: std::fmt::Arguments<'_>) -> Self {
        match self {
            ParallelError::Device(DeviceError::OverBudget(source))
            | ParallelError::Model(ModelError::Device(DeviceError::OverBudget(source))) => {
                ParallelError::OverBudget { line: line.to_string(), source }
            }
            ParallelError::Device(DeviceError::OutOfMemory(cause))
            | ParallelError::Model(ModelError::Device(DeviceError::OutOfMemory(cause))) => {
                ParallelError::Device(DeviceError::OutOfMemory(format!("{line}: {cause}")))
            }
            other => other,
        }
    }
}
