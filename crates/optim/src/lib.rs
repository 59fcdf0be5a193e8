//! Optimizers over flat buffers, gradient clipping, learning-rate schedules.

mod clip;
mod lr;
mod optimizer;

pub use clip::clip_coefficient;
pub use lr::{Decay, LrSchedule};
pub use optimizer::{AdamWSettings, Optimizer, OptimizerKind, SgdSettings, StepSettings};
