//! SGD with momentum, as PyTorch defines it.

use super::rule::{Rule, StateSpec};
use crate::members::UpdatedParameter;
use crate::settings::OptimizerSettings;
use crate::step::UnitStep;
use trireme_tensor::updates::{MomentumStep, Update};

#[derive(Debug)]
pub(super) struct Sgd(pub(super) OptimizerSettings);

impl Rule for Sgd {
    fn states(&self) -> &'static [StateSpec] {
        const { &[StateSpec::new("momentum_buffer")] }
    }

    fn update(&self, member: &UpdatedParameter, step: &UnitStep<'_>) -> Update {
        let own = member.settings;
        Update::Momentum(MomentumStep {
            lr: step.lr(own),
            momentum: own.beta1.unwrap_or(self.0.momentum as f32),
            nesterov: self.0.nesterov,
            weight_decay: own.weight_decay,
            grad_scale: step.grad_scale(),
            step: step.update_number(member),
        })
    }
}
