//! Applies a layout to a model and runs its step program.
//!
//! [`Executor`] holds a rank's share of a model and runs programs that `trireme_schedule::validate` has accepted. It makes no scheduling
//! decisions of its own.

mod axis;
mod error;
mod executor;
mod gradients;
mod layout;
mod memory;
mod offload;
mod parameters;
mod step;

pub use error::ParallelError;
pub use executor::{
    ActionTime, Executor, ExecutorSetup, Generation, StepHashes, ValidationBatches, ValidationRound,
};
pub use layout::{Degrees, Placements, RankGrid, chain};
pub use offload::{OffloadOptions, Spill};
pub use step::{
    Determinism, ExecutorOptions, GradNorm, NonFinite, Skipped, StepOutcome, StepPlan, ZeroPlusPlus,
};
pub use trireme_swap::SwapOptions;
