//! AdamW, Adam, and the Adam variants that may exchange momentum instead of gradients.

use super::rule::{Rule, StateSpec};
use crate::members::UpdatedParameter;
use crate::settings::OptimizerSettings;
use crate::step::UnitStep;
use trireme_tensor::updates::{AdamWStep, Update};

pub(super) const MOMENTS: &[StateSpec] = &[StateSpec::new("exp_avg"), StateSpec::second_moment("exp_avg_sq")];

/// Returns the scalars of an update of Adam or one of its variants.
pub(super) fn adamw_step(
    settings: OptimizerSettings,
    member: &UpdatedParameter,
    step: &UnitStep<'_>,
) -> AdamWStep {
    let (own, number) = (member.settings, step.update_number(member));
    AdamWStep {
        lr: step.lr(own),
        beta1: own.beta1.unwrap_or(settings.beta1 as f32),
        beta2: own.beta2.unwrap_or(settings.beta2 as f32),
        nu: settings.nu as f32,
        epsilon: settings.eps as f32,
        weight_decay: own.weight_decay,
        grad_scale: step.grad_scale(),
        step: number,
        num_second_updates: number,
    }
}

/// AdamW (Loshchilov, Hutter 2019).
#[derive(Debug)]
pub(super) struct AdamW {
    pub(super) settings: OptimizerSettings,
    pub(super) lr_scale: f32,
}

impl Rule for AdamW {
    fn states(&self) -> &'static [StateSpec] {
        MOMENTS
    }

    fn update(&self, member: &UpdatedParameter, step: &UnitStep<'_>) -> Update {
        let adamw = adamw_step(self.settings, member, step);
        Update::AdamW(AdamWStep { lr: adamw.lr * self.lr_scale, ..adamw })
    }
}

/// Adam (Kingma, Ba 2015), with weight decay in the gradient.
#[derive(Debug)]
pub(super) struct Adam(pub(super) OptimizerSettings);

impl Rule for Adam {
    fn states(&self) -> &'static [StateSpec] {
        MOMENTS
    }

    fn update(&self, member: &UpdatedParameter, step: &UnitStep<'_>) -> Update {
        Update::Adam(adamw_step(self.0, member, step))
    }
}

/// Adam with decoupled weight decay whose second moment is updated by a schedule: 1-bit Adam and 0/1 Adam.
#[derive(Debug)]
pub(crate) struct CompressedAdam {
    pub(super) settings: OptimizerSettings,
    pub(super) schedule: VarianceSchedule,
}

impl CompressedAdam {
    /// Returns whether a member's update number `step`, counted from 1, updates its second moment.
    pub(crate) fn updates_second_moment(&self, step: u64) -> bool {
        self.schedule.at(step).0
    }

    pub(crate) fn adam_step(&self, member: &UpdatedParameter, step: &UnitStep<'_>) -> AdamWStep {
        let num_second = self.schedule.at(step.update_number(member)).1;
        AdamWStep { num_second_updates: num_second, ..adamw_step(self.settings, member, step) }
    }
}

impl Rule for CompressedAdam {
    fn states(&self) -> &'static [StateSpec] {
        MOMENTS
    }

    fn update(&self, member: &UpdatedParameter, step: &UnitStep<'_>) -> Update {
        let adam = self.adam_step(member, step);
        if self.updates_second_moment(step.update_number(member)) {
            Update::AdamW(adam)
        } else {
            Update::FrozenAdam(adam)
        }
    }

    fn compressed_adam(&self) -> Option<&CompressedAdam> {
        Some(self)
    }
}

/// Schedule of the steps that update the second moment. Optimizers exchange momentum in the other steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum VarianceSchedule {
    /// The first `num_steps` steps only: 1-bit Adam (Tang et al. 2021).
    Warmup { num_steps: u64 },
    /// Every step for `num_updates` updates, then every second step for as many, then every fourth, and so on: 0/1 Adam (Lu et al. 2022,
    /// section 5).
    Doubling { num_updates: u64 },
}

impl VarianceSchedule {
    /// Returns whether step `step`, counted from 1, updates the second moment, and the number of such steps up to and including this one.
    fn at(self, step: u64) -> (bool, u64) {
        match self {
            VarianceSchedule::Warmup { num_steps } => (step <= num_steps, step.min(num_steps)),
            VarianceSchedule::Doubling { num_updates } => {
                let (mut first, mut interval, mut count) = (1, 1, 0);
                while let Some(next) = num_updates.checked_mul(interval).and_then(|n| n.checked_add(first))
                    && next <= step
                {
                    (first, interval, count) = (next, 2 * interval, count + num_updates);
                }
                let since = step - first;
                (since.is_multiple_of(interval), count + since / interval + 1)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variance_schedules_count_their_updates() {
        let updates = |schedule: VarianceSchedule, steps: u64| -> Vec<u64> {
            let mut count = 0;
            let mut updates = Vec::new();
            for step in 1..=steps {
                let (is_update, found) = schedule.at(step);
                if is_update {
                    count += 1;
                    updates.push(step);
                }
                assert_eq!(found, count, "step {step}");
            }
            updates
        };
        assert_eq!(updates(VarianceSchedule::Warmup { num_steps: 3 }, 9), [1, 2, 3]);
        assert_eq!(updates(VarianceSchedule::Doubling { num_updates: 2 }, 20), [1, 2, 3, 5, 7, 11, 15]);
        assert_eq!(VarianceSchedule::Doubling { num_updates: u64::MAX }.at(u64::MAX), (true, u64::MAX));
    }
}
