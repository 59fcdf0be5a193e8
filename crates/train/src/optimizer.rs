//! From the config to an optimizer.

use crate::config::{self, Config, OptimizerName};
use crate::error::TrainError;
use crate::setup::precision;
use trireme_optim::{
    AdafactorSettings, AdamWSettings, LarsSettings, LionSettings, MuonScale, MuonSettings, OptimizerKind,
    OptimizerOptions, SgdSettings, StateDType, VarianceSchedule,
};
use trireme_tensor::{ParameterTable, Precision};

/// The optimizer that the config describes, for a model with these parameters.
///
/// # Errors
/// Groups without a parameter, and groups that freeze all parameters.
pub fn optimizer_options(config: &Config, table: &ParameterTable) -> Result<OptimizerOptions, TrainError> {
    let optimizer = config.optimizer();
    let names: Vec<&str> = table.parameters().iter().map(|info| info.name.as_str()).collect();
    let options = OptimizerOptions {
        kind: optimizer_kind(optimizer, precision(config.training().dtype)),
        weight_decay: optimizer.weight_decay as f32,
        decay_norms_and_biases: optimizer.decay_norms_and_biases,
        groups: config.parameter_groups(&names)?,
        state_dtype: match optimizer.state_dtype {
            config::StateDtype::F32 => StateDType::F32,
            config::StateDtype::Bf16 => StateDType::Bf16,
            config::StateDtype::Int8 => StateDType::Int8,
        },
        balance_rate: config.experts().bias_update_rate as f32,
    };
    match names.iter().all(|name| options.is_frozen(name)) {
        true => Err(TrainError::AllFrozen { num_parameters: names.len() }),
        false => Ok(options),
    }
}

/// The optimizer that `[optimizer]` names, with its settings, for a model in `precision`.
pub fn optimizer_kind(optimizer: &config::Optimizer, precision: Precision) -> OptimizerKind {
    let (beta1, beta2, momentum) =
        (optimizer.beta1 as f32, optimizer.beta2 as f32, optimizer.momentum as f32);
    let adamw = AdamWSettings { beta1, beta2, nu: optimizer.nu as f32, epsilon: optimizer.eps as f32 };
    match optimizer.name {
        OptimizerName::AdamW => OptimizerKind::AdamW(adamw),
        OptimizerName::Adam => OptimizerKind::Adam(adamw),
        OptimizerName::Sgd => OptimizerKind::Sgd(SgdSettings { momentum, nesterov: optimizer.nesterov }),
        OptimizerName::Lion => OptimizerKind::Lion(LionSettings { beta1, beta2 }),
        OptimizerName::Adafactor => OptimizerKind::Adafactor(AdafactorSettings {
            beta2_decay: optimizer.beta2_decay as f32,
            clip_threshold: optimizer.clip_threshold as f32,
            relative_step: optimizer.relative_step,
        }),
        OptimizerName::Lamb => OptimizerKind::Lamb(adamw),
        OptimizerName::Lars => {
            let trust_coefficient = optimizer.trust_coefficient as f32;
            OptimizerKind::Lars(LarsSettings { momentum, trust_coefficient })
        }
        OptimizerName::Muon => OptimizerKind::Muon(MuonSettings {
            momentum: optimizer.muon_momentum as f32,
            nesterov: true,
            num_iterations: optimizer.muon_iterations,
            scale: match optimizer.muon_scale {
                config::MuonScale::Original => MuonScale::Original,
                config::MuonScale::MatchRmsAdamw => MuonScale::MatchAdamW,
            },
            precision,
            adamw,
            adamw_lr_scale: optimizer.muon_adamw_lr_scale as f32,
        }),
        OptimizerName::OneBitAdam => {
            let schedule = VarianceSchedule::Warmup { num_steps: optimizer.freeze_step };
            OptimizerKind::CompressedAdam(adamw, schedule)
        }
        OptimizerName::ZeroOneAdam => {
            let schedule = VarianceSchedule::Doubling { num_updates: optimizer.var_update_scaler };
            OptimizerKind::CompressedAdam(adamw, schedule)
        }
    }
}
