//! What a step program takes before it runs, and what makes it fit.
//!
//! The executor finds in a dry run how many bytes are in use at each line of a program, and the caller gives that as data
//! ([`DryRun`]). [`Fitting`] finds the least recomputation that fits, and the state that is best moved elsewhere. [`simulate`] tells when each action of a program runs, and [`step_time`](fn@step_time) how long a step takes.
//! Nothing here does IO, starts a thread, reads a clock or sees a tensor.

mod fitting;
mod offload;
mod recomputation;
mod report;
mod sizes;
mod step_time;
mod timeline;
mod usage;

pub use fitting::{Fitting, MemoryChoices, Open};
pub use offload::MemoryBounds;
pub use report::{peak_moment, table};
pub use sizes::{BatchMemory, StateSizes, UnitSizes};
pub use step_time::{Rates, StepTime, step_time};
pub use timeline::{StepTimeline, simulate};
pub use usage::DryRun;
