//! What a step program takes before it runs, and what makes it fit.
//!
//! [`predict`] goes through a [`Program`](trireme_schedule::Program) with the sizes of a model's units and of a layout,
//! given as data, and finds how many bytes are in use at each line. [`choose_keeps`] finds the least recomputation that fits,
//! [`fit_places`] the state that is best moved elsewhere. [`simulate`] tells when each action of a step runs.
//! Nothing here does IO, starts a thread, reads a clock or sees a tensor.

mod memory;
mod offload;
mod recomputation;
mod report;
mod setup;
mod timeline;
mod usage;

pub use memory::predict;
pub use offload::{MemoryBounds, Placing, Traffic, fit_places};
pub use recomputation::{Choice, Room, choose_keeps, fit_keeps};
pub use report::table;
pub use setup::{
    BatchMemory, CompressionMemory, HostLevels, MemorySetup, StepExchange, TiedLens, UnitMemory,
};
pub use timeline::{StepTimeline, simulate};
pub use usage::{CategoryBytes, Prediction};
