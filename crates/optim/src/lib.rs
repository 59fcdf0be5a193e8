//! Optimizers over flat buffers, gradient clipping, loss scaling, learning-rate schedules.

mod clip;
mod error;
mod loss_scaler;
mod lr;
mod optimizer;

pub use clip::clip_coefficient;
pub use error::OptimError;
pub use loss_scaler::{LossScaler, LossScalerState, LossScaling};
pub use lr::{Decay, LrSchedule};
pub use optimizer::{AdamWSettings, Optimizer, OptimizerKind, SgdSettings, StepSettings};
