//! Predicts the memory and time of a step program before it runs, and chooses recomputation and offloading so that the program fits into
//! memory.
//!
//! The executor determines in a dry run how many bytes are in use at each line of a program. The caller passes the result as data
//! ([`DryRun`]). [`MemorySearch`] finds the least recomputation that fits, and the state to offload. [`simulate`] computes when each action
//! of a program runs, and [`step_time`](fn@step_time) how long a step takes. This crate does no IO, starts no threads, reads no clock and
//! uses no tensors.

mod dry_run;
mod memory_search;
mod offload;
mod recomputation;
mod report;
mod sizes;
mod step_time;
mod timeline;

pub use dry_run::DryRun;
pub use memory_search::{MemoryChoices, MemorySearch, OpenChoices};
pub use offload::MemoryBounds;
pub use report::{format_memory_table, peak_location};
pub use sizes::{BatchTensorSize, ModelSizes, UnitSizes};
pub use step_time::{OperationTimes, StepTime, step_time};
pub use timeline::{StepTimeline, simulate};
