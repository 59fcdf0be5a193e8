//! The optimizer and the learning-rate schedule that a config describes.

use crate::config::Config;
use crate::error::TrainError;
use trireme_optim::{LrSchedule, OptimizerOptions};
use trireme_tensor::ParameterTable;

/// Returns the optimizer options of a config, for a model with these parameters.
///
/// # Errors
/// If a group has no parameters, or if the groups freeze all parameters.
pub fn optimizer_options(config: &Config, table: &ParameterTable) -> Result<OptimizerOptions, TrainError> {
    let optimizer = config.optimizer();
    let names: Vec<&str> = table.parameters().iter().map(|info| info.name.as_str()).collect();
    let options = OptimizerOptions {
        name: optimizer.name,
        settings: optimizer.settings,
        weight_decay: optimizer.weight_decay as f32,
        decay_norms_and_biases: optimizer.decay_norms_and_biases,
        groups: config.parameter_groups(&names)?,
        state_dtype: optimizer.state_dtype,
        balance_rate: config.experts().bias_update_rate as f32,
        precision: config.training().dtype,
    };
    if names.iter().all(|name| options.is_frozen(name)) {
        Err(TrainError::AllFrozen { num_parameters: names.len() })
    } else {
        Ok(options)
    }
}

pub(crate) fn lr_schedule(config: &Config) -> LrSchedule {
    let scheduler = config.lr_scheduler();
    LrSchedule {
        peak: config.optimizer().lr,
        warmup_steps: scheduler.warmup_steps,
        decay: scheduler.decay,
        decay_steps: scheduler.decay_steps,
        total_steps: config.training().steps,
        min_factor: scheduler.min_lr_factor,
    }
}
