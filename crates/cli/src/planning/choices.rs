//! Memory choices that the config leaves to the planner.

use trireme_planner::Open;
use trireme_train::config::{ActivationCheckpointMode, Config, Tier};

/// Returns the memory choices whose keys are `auto`.
pub(crate) fn open_choices(config: &Config) -> Open {
    let open = config.offload().tiers().into_iter().filter(|(_, tier)| *tier == Tier::Auto);
    Open {
        keeps: config.activation_checkpoint().mode == ActivationCheckpointMode::Auto,
        classes: open.map(|(class, _)| class).collect(),
    }
}
