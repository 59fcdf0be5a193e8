//! Optimizers over flat buffers, gradient clipping, loss scaling, learning-rate schedules.

mod clip;
mod error;
mod exchange;
mod factored;
mod groups;
mod kind;
mod loss_scaler;
mod lr;
mod members;
mod muon;
mod optimizer;
mod shards;
mod share;
mod states;
mod step;

pub use clip::clip_coefficient;
pub use error::OptimError;
pub use exchange::Exchange;
pub use groups::ParameterGroup;
pub use kind::{
    AdafactorSettings, AdamWSettings, LarsSettings, LionSettings, MuonScale, MuonSettings, OptimizerKind,
    OptimizerOptions, SgdSettings, VarianceSchedule,
};
pub use loss_scaler::{LossScaler, LossScalerState, LossScaling};
pub use lr::{Decay, LrSchedule};
pub use optimizer::Optimizer;
pub use shards::{ShardOps, WholeUnits};
pub use states::{State, StateInfo};
pub use step::StepSettings;
pub use trireme_tensor::StateDType;
