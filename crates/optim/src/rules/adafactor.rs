//! Adafactor (Shazeer, Stern 2018): its scalars, and its update of parameters that are not factored.

use super::rule::{Rule, StateSpec};
use crate::members::UpdatedParameter;
use crate::settings::OptimizerSettings;
use crate::step::UnitStep;
use trireme_tensor::StepScale;
use trireme_tensor::updates::{AdafactorVectorStep, Update};

#[derive(Debug)]
pub(super) struct UnfactoredAdafactor(pub(super) OptimizerSettings);

impl Rule for UnfactoredAdafactor {
    fn states(&self) -> &'static [StateSpec] {
        const { &[StateSpec::second_moment("exp_avg_sq")] }
    }

    fn update(&self, member: &UpdatedParameter, step: &UnitStep<'_>) -> Update {
        Update::AdafactorVector(adafactor_step(self.0, member, step))
    }

    fn num_sums(&self) -> [usize; 2] {
        [1, 1]
    }

    fn sums_pass(&self, phase: usize, member: &UpdatedParameter, step: &UnitStep<'_>) -> Update {
        match phase {
            0 => Update::Norms { grad_scale: step.grad_scale() },
            _ => Update::AdafactorVectorMoment(adafactor_step(self.0, member, step)),
        }
    }

    fn sums_pass_changes_states(&self, phase: usize) -> bool {
        phase == 1
    }

    fn scale(&self, member: &UpdatedParameter, step: &UnitStep<'_>) -> StepScale {
        adafactor_scale(self.0, member, step)
    }
}

/// Returns the scale of a member's update. The scale includes the learning rate, because [`adafactor_step`] uses a learning rate of 1.
pub(crate) fn adafactor_scale(
    settings: OptimizerSettings,
    member: &UpdatedParameter,
    step: &UnitStep<'_>,
) -> StepScale {
    let (clip_threshold, is_relative) = (settings.clip_threshold as f32, settings.relative_step);
    let lr = step.settings.lr * f64::from(member.settings.lr_scale);
    let lr = if is_relative { lr.min(1.0 / (step.update_number(member) as f64).sqrt()) } else { lr };
    StepScale::Adafactor { lr, is_relative, clip_threshold, num_elements: step.num_elements(member) }
}

/// Returns the scalars of a member's update, except the learning rate.
pub(crate) fn adafactor_step(
    settings: OptimizerSettings,
    member: &UpdatedParameter,
    step: &UnitStep<'_>,
) -> AdafactorVectorStep {
    let own = member.settings;
    let lr = step.settings.lr * f64::from(own.lr_scale);
    // Like the other settings, the exponent is rounded to f32.
    let beta2_decay = f64::from(settings.beta2_decay as f32);
    AdafactorVectorStep {
        lr: 1.0,
        mixing: (step.update_number(member) as f64).powf(beta2_decay) as f32,
        parameter_factor: (1.0 - lr * f64::from(own.weight_decay)) as f32,
        grad_scale: step.grad_scale(),
    }
}
