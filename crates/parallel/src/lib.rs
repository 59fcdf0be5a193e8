//! Applies a layout to a model and runs its step program.
//!
//! [`Executor`] holds a rank's share of a model and runs programs; it decides nothing. What a program may contain is proven by
//! `trireme_schedule::validate` before it runs.

mod axis;
mod chain;
mod compressed;
mod counted;
mod error;
mod exchange;
mod exchange_memory;
mod exchanged;
mod executor;
mod fp8;
mod gradients;
mod hashes;
mod hierarchical;
mod holders;
mod offload;
mod packed;
mod parameters;
mod placement;
mod pool;
mod ranks;
mod reduction;
mod secondary;
mod shard_sum;
mod space;
mod squares;
mod step;
mod tied;
mod tree;
mod validation;
mod vector;
mod waiting;

pub use chain::chain;
pub use error::ParallelError;
pub use executor::{ActionTime, Executor, ExecutorSetup, Generation, MemoryUse};
pub use hashes::StepHashes;
pub use offload::{OffloadOptions, Spill};
pub use placement::Placements;
pub use ranks::{Degrees, RankGrid};
pub use step::{
    Determinism, ExecutorOptions, GradNorm, NonFinite, Skipped, StepOutcome, StepPlan, ZeroPlusPlus,
};
pub use trireme_swap::SwapOptions;
pub use validation::{ValidationBatches, ValidationRound};
