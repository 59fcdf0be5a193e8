//! Signum (Bernstein et al., "signSGD", 2018, algorithm 2): the sign of a mean of gradients.

use super::rule::{Rule, StateSpec};
use crate::members::Member;
use crate::settings::OptimizerSettings;
use crate::step::UnitStep;
use trireme_tensor::updates::{LionStep, Update};

/// Names of the settings that it uses.
pub(super) const SETTINGS: &[&str] = &["momentum"];

#[derive(Debug)]
pub(super) struct Signum(pub(super) OptimizerSettings);

impl Rule for Signum {
    fn states(&self) -> &'static [StateSpec] {
        const { &[StateSpec::new("exp_avg")] }
    }

    fn update(&self, member: &Member, step: &UnitStep<'_>) -> Update {
        let own = member.settings;
        let momentum = own.beta1.unwrap_or(self.0.momentum as f32);
        Update::Lion(LionStep {
            lr: step.lr(own),
            beta1: momentum,
            beta2: momentum,
            weight_decay: own.weight_decay,
            grad_scale: step.grad_scale(),
        })
    }
}
