//! Lion (Chen et al. 2023).

use super::rule::{Rule, StateSpec};
use crate::members::UpdatedParameter;
use crate::settings::OptimizerSettings;
use crate::step::UnitStep;
use trireme_tensor::updates::{LionStep, Update};

#[derive(Debug)]
pub(super) struct Lion(pub(super) OptimizerSettings);

impl Rule for Lion {
    fn states(&self) -> &'static [StateSpec] {
        const { &[StateSpec::new("exp_avg")] }
    }

    fn update(&self, member: &UpdatedParameter, step: &UnitStep<'_>) -> Update {
        let own = member.settings;
        Update::Lion(LionStep {
            lr: step.lr(own),
            beta1: own.beta1.unwrap_or(self.0.beta1 as f32),
            beta2: own.beta2.unwrap_or(self.0.beta2 as f32),
            weight_decay: own.weight_decay,
            grad_scale: step.grad_scale(),
        })
    }
}
