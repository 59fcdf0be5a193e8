//! The rules that go over elements: all but those that look at whole matrices.

use crate::groups::ParameterSettings;
use crate::kind::{
    AdafactorSettings, AdamWSettings, LarsSettings, LionSettings, SgdSettings, VarianceSchedule,
};
use crate::members::{Cut, Member, Members};
use crate::optimizer::UnitStep;
use trireme_tensor::{
    AdamStep, AdamWStep, DeviceError, LarsStep, LionStep, MomentumStep, OptimizerState, RmsStep, Update,
    View, ViewMut,
};

/// How elements are updated.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Rule {
    /// With a factor of the learning rate.
    AdamW(AdamWSettings, f32),
    Adam(AdamWSettings),
    CompressedAdam(AdamWSettings, VarianceSchedule),
    Sgd(SgdSettings),
    Lion(LionSettings),
    Lamb(AdamWSettings),
    Lars(LarsSettings),
    /// Adafactor, for parameters that are not factored.
    Rms(AdafactorSettings),
}

impl Rule {
    /// The states with their names, and whether they are second moments.
    pub(crate) fn states(self) -> &'static [(&'static str, bool)] {
        match self {
            Rule::AdamW(..) | Rule::Adam(_) | Rule::CompressedAdam(..) | Rule::Lamb(_) => {
                &[("exp_avg", false), ("exp_avg_sq", true)]
            }
            Rule::Sgd(_) | Rule::Lars(_) => &[("momentum_buffer", false)],
            Rule::Lion(_) => &[("exp_avg", false)],
            Rule::Rms(_) => &[("exp_avg_sq", true)],
        }
    }

    /// How its pieces are cut, if states need no blocks.
    pub(crate) fn cut(self) -> Cut {
        match self {
            Rule::Lamb(_) | Rule::Lars(_) | Rule::Rms(_) => Cut::Leaves,
            _ => Cut::Anywhere,
        }
    }

    /// Sums over each whole parameter that it needs, in the first exchange and in the second.
    fn num_sums(self) -> [usize; 2] {
        match self {
            Rule::Lamb(_) | Rule::Lars(_) => [2, 0],
            Rule::Rms(_) => [1, 1],
            _ => [0, 0],
        }
    }

    /// Adam's numbers for a member, if momentum may be exchanged instead of gradients.
    pub(crate) fn adam_step(self, member: &Member, step: &UnitStep<'_>) -> Option<AdamStep> {
        let Rule::CompressedAdam(settings, schedule) = self else { return None };
        let num_second = schedule.at(step.settings.step).1;
        Some(AdamStep { adamw: adamw(settings, member.settings, step, 1.0), num_second })
    }

    /// Whether states change before the exchange `phase`.
    fn observes_states(self, phase: usize) -> bool {
        matches!((self, phase), (Rule::Lamb(_), 0) | (Rule::Rms(_), 1))
    }

    /// What goes over a member before the exchange `phase`.
    fn before(self, phase: usize, member: &Member, step: &UnitStep<'_>, known: &[f64]) -> Update {
        match (self, phase) {
            (Rule::Lamb(settings), _) => Update::LambMoments(adamw(settings, member.settings, step, 1.0)),
            (Rule::Rms(settings), 1) => Update::RmsMoment(rms(settings, member, step, known)),
            _ => Update::Norms { grad_scale: step.grad_scale() },
        }
    }

    /// The update itself, by the sums that are known.
    fn update(self, member: &Member, step: &UnitStep<'_>, known: &[f64]) -> Update {
        let own = member.settings;
        let (lr, grad_scale, weight_decay) = (step.lr(own), step.grad_scale(), own.weight_decay);
        match self {
            Rule::AdamW(settings, lr_scale) => Update::AdamW(adamw(settings, own, step, lr_scale)),
            Rule::Adam(settings) => Update::Adam(adamw(settings, own, step, 1.0)),
            Rule::CompressedAdam(settings, schedule) => {
                let (is_update, num_second) = schedule.at(step.settings.step);
                let step = AdamStep { adamw: adamw(settings, own, step, 1.0), num_second };
                if is_update { Update::CountedAdam(step) } else { Update::FrozenAdam(step) }
            }
            Rule::Sgd(SgdSettings { momentum, nesterov }) => {
                let (step, momentum) = (step.settings.step, own.beta1.unwrap_or(momentum));
                Update::Momentum(MomentumStep { lr, momentum, nesterov, weight_decay, grad_scale, step })
            }
            Rule::Lion(LionSettings { beta1, beta2 }) => {
                let (beta1, beta2) = (own.beta1.unwrap_or(beta1), own.beta2.unwrap_or(beta2));
                Update::Lion(LionStep { lr, beta1, beta2, weight_decay, grad_scale })
            }
            Rule::Lamb(settings) => {
                let trust = ratio(known[0].sqrt(), known[1].sqrt());
                Update::Lamb(AdamWStep { lr: lr * trust, ..adamw(settings, own, step, 1.0) })
            }
            Rule::Lars(LarsSettings { momentum, trust_coefficient }) => {
                let norm = known[0].sqrt();
                let trust = ratio(norm, known[1].sqrt() + f64::from(weight_decay) * norm);
                let (lr, momentum) = (lr * trust_coefficient * trust, own.beta1.unwrap_or(momentum));
                Update::Lars(LarsStep { lr, momentum, weight_decay, grad_scale })
            }
            Rule::Rms(settings) => Update::Rms(rms(settings, member, step, known)),
        }
    }
}

fn adamw(settings: AdamWSettings, own: ParameterSettings, step: &UnitStep<'_>, lr_scale: f32) -> AdamWStep {
    AdamWStep {
        lr: step.lr(own) * lr_scale,
        beta1: own.beta1.unwrap_or(settings.beta1),
        beta2: own.beta2.unwrap_or(settings.beta2),
        nu: settings.nu,
        epsilon: settings.epsilon,
        weight_decay: own.weight_decay,
        grad_scale: step.grad_scale(),
        step: step.settings.step,
    }
}

/// Of two lengths; 1 where one of them is zero or not finite, for then it says nothing.
fn ratio(left: f64, right: f64) -> f32 {
    let ratio = (left / right) as f32;
    if left > 0.0 && right > 0.0 && ratio.is_finite() { ratio } else { 1.0 }
}

/// Adafactor's numbers, by the mean squares of the parameter and, once it is known, of its update.
pub(crate) fn adafactor(
    settings: AdafactorSettings,
    own: ParameterSettings,
    step: &UnitStep<'_>,
    mean_square: f64,
    update_mean_square: f64,
) -> RmsStep {
    /// Parameters count as no smaller: zeros could not begin to move.
    const SIZE_MIN: f64 = 1e-3;
    let number = step.settings.step as f64;
    let lr = step.settings.lr * f64::from(own.lr_scale);
    let size = match settings.relative_step {
        true => mean_square.sqrt().max(SIZE_MIN) * lr.min(1.0 / number.sqrt()),
        false => lr,
    };
    let excess = (update_mean_square.sqrt() / f64::from(settings.clip_threshold)).max(1.0);
    RmsStep {
        lr: (size / excess) as f32,
        mixing: number.powf(f64::from(settings.beta2_decay)) as f32,
        keep: (1.0 - lr * f64::from(own.weight_decay)) as f32,
        grad_scale: step.grad_scale(),
    }
}

fn rms(settings: AdafactorSettings, member: &Member, step: &UnitStep<'_>, known: &[f64]) -> RmsStep {
    let num_elements = step.num_elements(member) as f64;
    adafactor(settings, member.settings, step, known[0] / num_elements, known[1] / num_elements)
}

/// The parameters of a unit with one rule, and their states.
#[derive(Debug)]
pub(crate) struct Share {
    pub(crate) rule: Rule,
    pub(crate) members: Members,
    pub(crate) states: Vec<OptimizerState>,
    /// For each member, the sums that are known by now.
    known: Vec<[f64; 2]>,
}

impl Share {
    pub(crate) fn new(rule: Rule, members: Members, states: Vec<OptimizerState>) -> Self {
        let known = vec![[0.0; 2]; members.list.len()];
        Share { rule, members, states, known }
    }

    /// Takes the sums of what is here that the exchange `phase` adds up.
    pub(crate) fn observe(
        &mut self,
        phase: usize,
        step: &UnitStep<'_>,
        parameters: ViewMut<'_>,
        grads: View<'_>,
        sums: &mut Vec<f64>,
    ) -> Result<(), DeviceError> {
        let num_sums = self.rule.num_sums()[phase];
        if num_sums == 0 {
            return Ok(());
        }
        let (rule, known) = (self.rule, &self.known);
        let states = if rule.observes_states(phase) { &mut self.states[..] } else { &mut [] };
        let updates = self.members.choose(|index, member| rule.before(phase, member, step, &known[index]));
        self.members.sum_by(step.device, |pieces, sums| {
            step.device.update((pieces, &updates), parameters, grads, states, step.noise, Some(sums));
        })?;
        for member in &self.members.list {
            let is_counted = step.counts(member);
            let sum = |which| if is_counted { self.members.sum(member, which) } else { 0.0 };
            sums.extend((0..num_sums).map(sum));
        }
        Ok(())
    }

    /// Takes its sums of the exchange `phase` from the front of `sums`.
    pub(crate) fn heed(&mut self, phase: usize, sums: &mut &[f64]) {
        let num_sums = self.rule.num_sums()[phase];
        let first = if phase == 0 { 0 } else { self.rule.num_sums()[0] };
        for known in &mut self.known {
            let (here, rest) = sums.split_at(num_sums);
            known[first..first + num_sums].copy_from_slice(here);
            *sums = rest;
        }
    }

    /// Updates what is here.
    pub(crate) fn apply(&mut self, step: &UnitStep<'_>, parameters: ViewMut<'_>, grads: View<'_>) {
        let (rule, known) = (self.rule, &self.known);
        self.members.update(step.device, parameters, grads, &mut self.states, step.noise, |index, member| {
            rule.update(member, step, &known[index])
        });
    }
}
