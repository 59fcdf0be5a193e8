//! The rules that go over elements: all but those that look at whole matrices.

use crate::kind::{
    AdafactorSettings, AdamWSettings, LarsSettings, LionSettings, SgdSettings, VarianceSchedule,
};
use crate::members::{Cut, Member, Members};
use crate::step::UnitStep;
use trireme_tensor::{
    AdamStep, AdamWStep, DeviceError, LarsStep, LionStep, MomentumStep, OptimizerState, RmsStep, StepScale,
    Tensor, Update, UpdatePass, View, ViewMut,
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
    /// By the sign of the gradient, as far as this. Neither learning rate nor weight decay counts.
    Sign(f32),
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
            Rule::Sign(_) => &[],
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
        let num_second = schedule.at(step.number(member)).1;
        Some(AdamStep { adamw: adamw(settings, member, step, 1.0), num_second })
    }

    /// Whether states change before the exchange `phase`.
    fn observes_states(self, phase: usize) -> bool {
        matches!((self, phase), (Rule::Lamb(_), 0) | (Rule::Rms(_), 1))
    }

    /// What goes over a member before the exchange `phase`.
    fn before(self, phase: usize, member: &Member, step: &UnitStep<'_>) -> Update {
        match (self, phase) {
            (Rule::Lamb(settings), _) => Update::LambMoments(adamw(settings, member, step, 1.0)),
            (Rule::Rms(settings), 1) => Update::RmsMoment(rms(settings, member, step)),
            _ => Update::Norms { grad_scale: step.grad_scale() },
        }
    }

    /// How the sums over a member scale the learning rate, if it takes any.
    fn scale(self, member: &Member, step: &UnitStep<'_>) -> StepScale {
        match self {
            Rule::Lamb(_) => StepScale::TrustRatio { weight_decay: 0.0 },
            Rule::Lars(_) => StepScale::TrustRatio { weight_decay: member.settings.weight_decay },
            Rule::Rms(settings) => adafactor_scale(settings, member, step),
            rule => unreachable!("{rule:?} takes no sums"),
        }
    }

    /// The update itself, of which the learning rate is still to be scaled.
    pub(crate) fn update(self, member: &Member, step: &UnitStep<'_>) -> Update {
        let own = member.settings;
        let (lr, grad_scale, weight_decay) = (step.lr(own), step.grad_scale(), own.weight_decay);
        match self {
            Rule::AdamW(settings, lr_scale) => Update::AdamW(adamw(settings, member, step, lr_scale)),
            Rule::Adam(settings) => Update::Adam(adamw(settings, member, step, 1.0)),
            Rule::CompressedAdam(settings, schedule) => {
                let (is_update, num_second) = schedule.at(step.number(member));
                let step = AdamStep { adamw: adamw(settings, member, step, 1.0), num_second };
                if is_update { Update::CountedAdam(step) } else { Update::FrozenAdam(step) }
            }
            Rule::Sgd(SgdSettings { momentum, nesterov }) => {
                let (step, momentum) = (step.number(member), own.beta1.unwrap_or(momentum));
                Update::Momentum(MomentumStep { lr, momentum, nesterov, weight_decay, grad_scale, step })
            }
            Rule::Lion(LionSettings { beta1, beta2 }) => {
                let (beta1, beta2) = (own.beta1.unwrap_or(beta1), own.beta2.unwrap_or(beta2));
                Update::Lion(LionStep { lr, beta1, beta2, weight_decay, grad_scale })
            }
            Rule::Lamb(settings) => Update::Lamb(adamw(settings, member, step, 1.0)),
            Rule::Lars(LarsSettings { momentum, trust_coefficient }) => {
                let (lr, momentum) = (lr * trust_coefficient, own.beta1.unwrap_or(momentum));
                Update::Lars(LarsStep { lr, momentum, weight_decay, grad_scale })
            }
            Rule::Rms(settings) => Update::Rms(rms(settings, member, step)),
            Rule::Sign(rate) => Update::Sign { rate },
        }
    }
}

fn adamw(settings: AdamWSettings, member: &Member, step: &UnitStep<'_>, lr_scale: f32) -> AdamWStep {
    let own = member.settings;
    AdamWStep {
        lr: step.lr(own) * lr_scale,
        beta1: own.beta1.unwrap_or(settings.beta1),
        beta2: own.beta2.unwrap_or(settings.beta2),
        nu: settings.nu,
        epsilon: settings.epsilon,
        weight_decay: own.weight_decay,
        grad_scale: step.grad_scale(),
        step: step.number(member),
    }
}

/// How Adafactor scales the learning rate of a member, which is 1 in [`rms`].
pub(crate) fn adafactor_scale(
    settings: AdafactorSettings,
    member: &Member,
    step: &UnitStep<'_>,
) -> StepScale {
    let AdafactorSettings { clip_threshold, relative_step: is_relative, .. } = settings;
    let lr = step.settings.lr * f64::from(member.settings.lr_scale);
    let lr = if is_relative { lr.min(1.0 / (step.number(member) as f64).sqrt()) } else { lr };
    StepScale::Adafactor { lr, is_relative, clip_threshold, num_elements: step.num_elements(member) }
}

/// Adafactor's other numbers.
pub(crate) fn rms(settings: AdafactorSettings, member: &Member, step: &UnitStep<'_>) -> RmsStep {
    let own = member.settings;
    let lr = step.settings.lr * f64::from(own.lr_scale);
    RmsStep {
        lr: 1.0,
        mixing: (step.number(member) as f64).powf(f64::from(settings.beta2_decay)) as f32,
        keep: (1.0 - lr * f64::from(own.weight_decay)) as f32,
        grad_scale: step.grad_scale(),
    }
}

/// The parameters of a unit with one rule, and their states.
#[derive(Debug)]
pub(crate) struct Share {
    pub(crate) rule: Rule,
    pub(crate) members: Members,
    pub(crate) states: Vec<OptimizerState>,
}

impl Share {
    /// Sums that the exchange `phase` adds up.
    pub(crate) fn num_sums(&self, phase: usize) -> usize {
        self.rule.num_sums()[phase] * self.members.list.len()
    }

    /// Takes the sums of what is here that the exchange `phase` adds up.
    pub(crate) fn observe(
        &mut self,
        phase: usize,
        step: &UnitStep<'_>,
        parameters: ViewMut<'_>,
        grads: View<'_>,
        sums: ViewMut<'_>,
    ) -> Result<(), DeviceError> {
        if self.num_sums(phase) == 0 {
            return Ok(());
        }
        let rule = self.rule;
        let states = if rule.observes_states(phase) { &mut self.states[..] } else { &mut [] };
        let updates = &self.members.choose(|member| rule.before(phase, member, step));
        self.members.sum_by(step.device, sums, |pieces, sums| {
            let (noise, sums) = (step.noise, Some(sums));
            let pass = UpdatePass { pieces, updates, scales: None, noise, sums };
            step.device.update(pass, parameters, grads, states);
        })
    }

    /// Updates what is here, by the `sums` of each exchange.
    pub(crate) fn apply(
        &mut self,
        step: &UnitStep<'_>,
        parameters: ViewMut<'_>,
        grads: View<'_>,
        [first, second]: [View<'_>; 2],
    ) -> Result<(), DeviceError> {
        let Share { rule, members, states } = self;
        let len = members.list.len();
        // Squares of parameters come first, and those of updates with them or in the second exchange.
        let sums = match rule.num_sums() {
            [0, _] => None,
            [1, _] => Some([first, second]),
            _ => Some([0, len].map(|start| first.part(start, [len].into()))),
        };
        let scales = sums.map(|sums| members.scales(step.device, sums, |member| rule.scale(member, step)));
        let scales = scales.transpose()?;
        let updates = &members.choose(|member| rule.update(member, step));
        let scales = scales.as_ref().map(Tensor::view);
        let pass = UpdatePass { pieces: &members.pieces, updates, scales, noise: step.noise, sums: None };
        step.device.update(pass, parameters, grads, states);
        Ok(())
    }
}
