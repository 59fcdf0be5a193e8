//! LARS (You et al. 2017): SGD whose updates have a norm proportional to the parameter's norm.

use super::rule::{Rule, StateSpec};
use crate::members::UpdatedParameter;
use crate::settings::OptimizerSettings;
use crate::step::UnitStep;
use trireme_tensor::StepScale;
use trireme_tensor::updates::{LarsStep, Update};

#[derive(Debug)]
pub(super) struct Lars(pub(super) OptimizerSettings);

impl Rule for Lars {
    fn states(&self) -> &'static [StateSpec] {
        const { &[StateSpec::new("momentum_buffer")] }
    }

    fn update(&self, member: &UpdatedParameter, step: &UnitStep<'_>) -> Update {
        let own = member.settings;
        Update::Lars(LarsStep {
            lr: step.lr(own) * self.0.trust_coefficient as f32,
            momentum: own.beta1.unwrap_or(self.0.momentum as f32),
            weight_decay: own.weight_decay,
            grad_scale: step.grad_scale(),
        })
    }

    fn num_sums(&self) -> [usize; 2] {
        [2, 0]
    }

    fn scale(&self, member: &UpdatedParameter, _step: &UnitStep<'_>) -> StepScale {
        StepScale::TrustRatio { weight_decay: member.settings.weight_decay }
    }
}
