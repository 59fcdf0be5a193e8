//! Optimizers over flat buffers, gradient clipping, loss scaling, learning-rate schedules.

mod clip;
mod elementwise;
mod error;
mod factored;
mod groups;
mod loss_scaler;
mod lr;
mod members;
mod momentum_exchange;
mod muon;
mod optimizer;
mod options;
mod rules;
mod settings;
mod shards;
mod states;
mod step;

pub use clip::clip_coefficient;
pub use error::OptimError;
pub use groups::ParameterGroup;
pub use loss_scaler::{LossScaler, LossScalerState, LossScaling};
pub use lr::{Decay, LrSchedule};
pub use momentum_exchange::ReducedQuantity;
pub use optimizer::{Optimizer, parameter_rounding_seed};
pub use options::OptimizerOptions;
pub use rules::OptimizerName;
pub use settings::{Limits, MuonScale, OptimizerSettings, Setting, SettingValue};
pub use shards::{ShardOps, Unsharded};
pub use states::{State, StateInfo};
pub use step::StepSettings;
pub use trireme_tensor::StateDType;
