//! What the config leaves to a plan.

use trireme_planner::Open;
use trireme_schedule::StateClass;
use trireme_train::config::{ActivationCheckpointMode, Config, Tier};

/// What of a step's memory the config leaves to a plan.
pub(crate) fn open_choices(config: &Config) -> Open {
    let offload = config.offload();
    let is_open = |class: &StateClass| {
        let tier = match class {
            StateClass::Optimizer => offload.optimizer,
            StateClass::Parameters => offload.parameters,
            StateClass::Gradients => offload.gradients,
            StateClass::Activations => offload.activations,
        };
        tier == Tier::Auto
    };
    Open {
        keeps: config.activation_checkpoint().mode == ActivationCheckpointMode::Auto,
        classes: StateClass::ALL.into_iter().filter(is_open).collect(),
    }
}
