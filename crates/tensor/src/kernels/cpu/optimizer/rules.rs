//! Elementwise update rules.

use super::pieces::PieceStates;
use crate::kernels::cpu::simd::{for_each_simd_level, sum_zip};

/// Hyperparameters of one AdamW update (Loshchilov, Hutter: "Decoupled weight decay regularization", algorithm 2).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWStep {
    /// Learning rate of this step.
    pub lr: f32,
    /// Decay rate of the first moment.
    pub beta1: f32,
    /// Decay rate of the second moment.
    pub beta2: f32,
    /// Weight of the first moment in the update of AdamW and Adam; the gradient itself has the remaining weight (`nu1` of Ma, Yarats:
    /// "Quasi-hyperbolic momentum and Adam for deep learning", 2019, equation 8). 1 gives the plain optimizer.
    pub nu: f32,
    /// Added to the square root of the second moment.
    pub epsilon: f32,
    /// Decoupled weight decay; 0 for parameters without decay.
    pub weight_decay: f32,
    /// Factor applied to every gradient first: mean over microbatches, and clipping.
    pub grad_scale: f32,
    /// Number of this step, from 1. Corrects the bias of the first moment.
    pub step: u64,
    /// Number of updates of the second moment, including this one. Corrects its bias. Equal to `step`, unless the second moment is not
    /// updated in every step.
    pub num_second_updates: u64,
}

impl AdamWStep {
    /// The first step with PyTorch's defaults, without weight decay.
    pub const DEFAULT: AdamWStep = AdamWStep {
        lr: 1e-3,
        beta1: 0.9,
        beta2: 0.999,
        nu: 1.0,
        epsilon: 1e-8,
        weight_decay: 0.0,
        grad_scale: 1.0,
        step: 1,
        num_second_updates: 1,
    };
}

/// Hyperparameters of one SGD update with momentum, as PyTorch defines it with dampening 0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MomentumStep {
    /// Learning rate of this step.
    pub lr: f32,
    /// Decay rate of the velocity; 0 for plain SGD.
    pub momentum: f32,
    /// Whether to step along `gradient + momentum * velocity` (Nesterov) instead of along the velocity.
    pub nesterov: bool,
    /// Added to the gradient as `weight_decay * parameter`.
    pub weight_decay: f32,
    /// Factor applied to every gradient first.
    pub grad_scale: f32,
    /// Number of this step, from 1. The first step sets the velocity to the gradient.
    pub step: u64,
}

/// Hyperparameters of one Lion update (Chen et al., "Symbolic discovery of optimization algorithms", 2023, program 1).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LionStep {
    /// Learning rate of this step.
    pub lr: f32,
    /// Weight of the momentum in the update.
    pub beta1: f32,
    /// Decay rate of the momentum.
    pub beta2: f32,
    /// Decoupled weight decay.
    pub weight_decay: f32,
    /// Factor applied to every gradient first.
    pub grad_scale: f32,
}

/// Hyperparameters of one LARS update (You et al., "Large batch training of convolutional networks", 2017, algorithm 1).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LarsStep {
    /// Learning rate of this step, to be multiplied by the parameter's [`StepScale`](super::StepScale).
    pub lr: f32,
    /// Decay rate of the velocity.
    pub momentum: f32,
    /// Added to the gradient as `weight_decay * parameter`.
    pub weight_decay: f32,
    /// Factor applied to every gradient first.
    pub grad_scale: f32,
}

/// Hyperparameters of one update of Muon's momentum (Jordan, "Muon", 2024).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MuonStep {
    /// Decay rate of the momentum, which is an average of gradients.
    pub momentum: f32,
    /// Whether to mix in the gradient once more (Nesterov).
    pub nesterov: bool,
    /// Factor applied to every gradient first.
    pub grad_scale: f32,
}

/// Hyperparameters of one Adafactor update of a vector (Shazeer, Stern, "Adafactor", 2018, algorithm 5).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdafactorVectorStep {
    /// Learning rate of this step, to be multiplied by the parameter's [`StepScale`](super::StepScale).
    pub lr: f32,
    /// Weight of the new square in the second moment.
    pub mixing: f32,
    /// Factor of the parameter (weight decay).
    pub parameter_factor: f32,
    /// Factor applied to every gradient first.
    pub grad_scale: f32,
}

/// The update of the elements of a piece, and the two sums over them that it computes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Update {
    /// AdamW; states: first and second moment. No sums.
    AdamW(AdamWStep),
    /// Adam (Kingma, Ba 2015), with the decay added to the gradient; states as for AdamW. No sums.
    Adam(AdamWStep),
    /// Adam with a frozen second moment and decoupled decay; states as for AdamW. No sums. Where the second moment is zero, only the decay
    /// applies.
    FrozenAdam(AdamWStep),
    /// The second half of [`Update::FrozenAdam`]: the gradient is already the new first moment; states as for AdamW. No sums.
    FrozenAdamFromMomentum(AdamWStep),
    /// The first half of [`Update::FrozenAdam`]: overwrites the gradients, which are passed in place of the parameters, with the new first
    /// moment; state: first moment, which is only read. Does not read `grads`. No sums.
    FrozenAdamMomentum(AdamWStep),
    /// SGD; state: velocity. No sums.
    Momentum(MomentumStep),
    /// Lion; state: momentum. No sums.
    Lion(LionStep),
    /// Sums: squares of parameter and gradient. Changes nothing.
    Norms {
        /// Factor applied to every gradient first.
        grad_scale: f32,
    },
    /// LARS; state: velocity. No sums.
    Lars(LarsStep),
    /// The moments of LAMB (You et al., "Large batch optimization for deep learning", 2020, algorithm 2); states as for AdamW. Parameters
    /// are unchanged. Sums: squares of the parameter and of its update.
    LambMoments(AdamWStep),
    /// LAMB's update from existing moments. Its learning rate is multiplied by the parameter's [`StepScale`](super::StepScale). No sums.
    Lamb(AdamWStep),
    /// The second moment of Adafactor's vectors; state: second moment. Parameters are unchanged. Sums: squares of the update, and 0.
    AdafactorVectorMoment(AdafactorVectorStep),
    /// Adafactor's update of vectors from the existing second moment. No sums.
    AdafactorVector(AdafactorVectorStep),
    /// Muon's momentum; state: momentum. Writes the matrix to be orthogonalized to the parameters. No sums.
    MuonMomentum(MuonStep),
    /// A step along the unmodified gradient, with decoupled decay. No sums.
    Descend {
        /// Learning rate.
        lr: f32,
        /// Factor of the parameter (weight decay).
        parameter_factor: f32,
    },
    /// A step of constant length against the sign of the gradient; no step where the gradient is 0. No sums.
    Sign {
        /// Length of the step.
        lr: f32,
    },
}

/// Bound on the magnitude of Adafactor's gradients. Keeps their squares finite.
const GRADIENT_MAX: f32 = 1e15;

/// Minimum second moment of Adafactor.
pub(super) const ADAFACTOR_MOMENT_MIN: f32 = 1e-30;

/// The hyperparameters of an Adam step, with derived coefficients that are the same for all elements.
#[derive(Clone, Copy)]
pub(crate) struct AdamCoefficients {
    step: AdamWStep,
    pub(crate) step_size: f32,
    /// Weight of the gradient in the direction: `1 - nu`, times the bias correction by which `step_size` is divided.
    pub(crate) gradient_share: f32,
    /// Reciprocal of the bias correction of the first moment.
    pub(crate) inverse_correction1: f32,
    /// Reciprocal of the square root of the bias correction of the second moment.
    pub(crate) inverse_root_correction2: f32,
    pub(crate) parameter_factor: f32,
}

impl AdamCoefficients {
    pub(crate) fn new(s: AdamWStep) -> Self {
        let correction1 = (1.0 - f64::from(s.beta1).powf(s.step as f64)) as f32;
        let correction2 = (1.0 - f64::from(s.beta2).powf(s.num_second_updates as f64)) as f32;
        AdamCoefficients {
            step: s,
            step_size: s.lr / correction1,
            gradient_share: (1.0 - s.nu) * correction1,
            inverse_correction1: 1.0 / correction1,
            inverse_root_correction2: 1.0 / correction2.sqrt(),
            parameter_factor: 1.0 - s.lr * s.weight_decay,
        }
    }

    /// Returns the direction of the update for a new first moment `m` and a gradient `g`.
    #[inline(always)]
    fn direction(self, m: f32, g: f32) -> f32 {
        if self.step.nu == 1.0 { m } else { self.step.nu * m + self.gradient_share * g }
    }
}

/// Returns the square of a gradient, bounded as for Adafactor.
#[inline(always)]
pub(super) fn bounded_square(g: f32) -> f32 {
    let g = g.clamp(-GRADIENT_MAX, GRADIENT_MAX);
    g * g
}

/// Returns Adam's denominator for a frozen second moment `v`. Where `v` is zero, there was no gradient before. A new gradient, or the
/// rounding error of a compressed momentum, would be divided by epsilon alone, so such elements are not updated.
#[inline(always)]
fn frozen_denominator(v: f32, c: AdamCoefficients) -> f32 {
    if v == 0.0 { f32::INFINITY } else { v.sqrt() * c.inverse_root_correction2 + c.step.epsilon }
}

/// Returns the sign of `x`; 0 for 0, unlike `signum`.
#[inline(always)]
fn sign(x: f32) -> f32 {
    if x == 0.0 { 0.0 } else { x.signum() }
}

for_each_simd_level! {
    fn adamw(p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32], c: AdamCoefficients) {
        let s = c.step;
        for (((p, &g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
            let g = g * s.grad_scale;
            *m = s.beta1 * *m + (1.0 - s.beta1) * g;
            *v = s.beta2 * *v + (1.0 - s.beta2) * g * g;
            *p = *p * c.parameter_factor - c.step_size * c.direction(*m, g) / (v.sqrt() * c.inverse_root_correction2 + s.epsilon);
        }
    }

    fn adam(p: &mut [f32], g: &[f32], m: &mut [f32], v: &mut [f32], c: AdamCoefficients) {
        let s = c.step;
        for (((p, &g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
            let g = g * s.grad_scale + s.weight_decay * *p;
            *m = s.beta1 * *m + (1.0 - s.beta1) * g;
            *v = s.beta2 * *v + (1.0 - s.beta2) * g * g;
            *p -= c.step_size * c.direction(*m, g) / (v.sqrt() * c.inverse_root_correction2 + s.epsilon);
        }
    }

    fn frozen_adam(p: &mut [f32], g: &[f32], m: &mut [f32], v: &[f32], c: AdamCoefficients) {
        let s = c.step;
        for (((p, &g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
            *m = s.beta1 * *m + (1.0 - s.beta1) * (g * s.grad_scale);
            *p = *p * c.parameter_factor - c.step_size * *m / frozen_denominator(*v, c);
        }
    }

    fn from_momentum(p: &mut [f32], g: &[f32], m: &mut [f32], v: &[f32], c: AdamCoefficients) {
        let s = c.step;
        for (((p, &g), m), v) in p.iter_mut().zip(g).zip(m).zip(v) {
            *m = g * s.grad_scale;
            *p = *p * c.parameter_factor - c.step_size * *m / frozen_denominator(*v, c);
        }
    }

    fn to_momentum(g: &mut [f32], m: &[f32], s: AdamWStep) {
        g.iter_mut().zip(m).for_each(|(g, m)| *g = s.beta1 * *m + (1.0 - s.beta1) * (*g * s.grad_scale));
    }

    fn momentum(p: &mut [f32], g: &[f32], velocity: &mut [f32], s: MomentumStep) {
        for ((p, &g), v) in p.iter_mut().zip(g).zip(velocity) {
            let g = g * s.grad_scale + s.weight_decay * *p;
            *v = if s.step == 1 { g } else { s.momentum * *v + g };
            *p -= s.lr * if s.nesterov { g + s.momentum * *v } else { *v };
        }
    }

    fn lion(p: &mut [f32], g: &[f32], m: &mut [f32], s: LionStep) {
        let parameter_factor = 1.0 - s.lr * s.weight_decay;
        for ((p, &g), m) in p.iter_mut().zip(g).zip(m) {
            let g = g * s.grad_scale;
            let mixed = s.beta1 * *m + (1.0 - s.beta1) * g;
            *p = *p * parameter_factor - s.lr * sign(mixed);
            *m = s.beta2 * *m + (1.0 - s.beta2) * g;
        }
    }

    fn step_by_sign(p: &mut [f32], g: &[f32], rate: f32) {
        p.iter_mut().zip(g).for_each(|(p, &g)| *p -= rate * sign(g));
    }

    fn norms(p: &[f32], g: &[f32], grad_scale: f32) -> [f32; 2] {
        let grads = sum_zip(g, g, g, |g, _, _| (g * grad_scale) * (g * grad_scale));
        [sum_zip(p, p, p, |p, _, _| p * p), grads]
    }

    fn lars(p: &mut [f32], g: &[f32], velocity: &mut [f32], s: LarsStep) {
        for ((p, &g), v) in p.iter_mut().zip(g).zip(velocity) {
            *v = s.momentum * *v + s.lr * (g * s.grad_scale + s.weight_decay * *p);
            *p -= *v;
        }
    }

    fn lamb_moments(p: &[f32], g: &[f32], m: &mut [f32], v: &mut [f32], c: AdamCoefficients) -> [f32; 2] {
        let s = c.step;
        for ((&g, m), v) in g.iter().zip(&mut *m).zip(&mut *v) {
            let g = g * s.grad_scale;
            *m = s.beta1 * *m + (1.0 - s.beta1) * g;
            *v = s.beta2 * *v + (1.0 - s.beta2) * g * g;
        }
        let updates = sum_zip(p, m, v, |p, m, v| {
            let update = lamb_update(c, p, m, v);
            update * update
        });
        [sum_zip(p, p, p, |p, _, _| p * p), updates]
    }

    fn lamb(p: &mut [f32], m: &[f32], v: &[f32], c: AdamCoefficients) {
        for ((p, &m), &v) in p.iter_mut().zip(m).zip(v) {
            *p -= c.step.lr * lamb_update(c, *p, m, v);
        }
    }

    fn adafactor_vector_moment(g: &[f32], v: &mut [f32], s: AdafactorVectorStep) -> f32 {
        for (&g, v) in g.iter().zip(&mut *v) {
            let square = bounded_square(g * s.grad_scale) + ADAFACTOR_MOMENT_MIN;
            *v = (1.0 - s.mixing) * *v + s.mixing * square;
        }
        sum_zip(g, v, v, |g, v, _| {
            let update = adafactor_update(g * s.grad_scale, v);
            update * update
        })
    }

    fn adafactor_vector(p: &mut [f32], g: &[f32], v: &[f32], s: AdafactorVectorStep) {
        for ((p, &g), &v) in p.iter_mut().zip(g).zip(v) {
            *p = *p * s.parameter_factor - s.lr * adafactor_update(g * s.grad_scale, v);
        }
    }

    fn muon_momentum(out: &mut [f32], g: &[f32], m: &mut [f32], s: MuonStep) {
        for ((out, &g), m) in out.iter_mut().zip(g).zip(m) {
            let g = g * s.grad_scale;
            *m = s.momentum * *m + (1.0 - s.momentum) * g;
            *out = if s.nesterov { s.momentum * *m + (1.0 - s.momentum) * g } else { *m };
        }
    }

    fn descend(p: &mut [f32], g: &[f32], lr: f32, keep: f32) {
        p.iter_mut().zip(g).for_each(|(p, g)| *p = *p * keep - lr * g);
    }
}

#[inline(always)]
fn lamb_update(c: AdamCoefficients, p: f32, m: f32, v: f32) -> f32 {
    m * c.inverse_correction1 / (v.sqrt() * c.inverse_root_correction2 + c.step.epsilon)
        + c.step.weight_decay * p
}

/// Returns a gradient divided by the square root of its second moment.
#[inline(always)]
pub(super) fn adafactor_update(g: f32, v: f32) -> f32 {
    g.clamp(-GRADIENT_MAX, GRADIENT_MAX) / v.max(ADAFACTOR_MOMENT_MIN).sqrt()
}

/// Access of an update to a value of an element.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ElementAccess {
    /// No access.
    Skip,
    Read,
    Change,
}

/// The work per element of an update: floating-point operations, and access to the parameter, the gradient and both states.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ElementCost {
    pub(crate) num_operations: usize,
    pub(crate) parameter: ElementAccess,
    pub(crate) gradient: ElementAccess,
    pub(crate) states: [ElementAccess; 2],
}

impl Update {
    /// Multiplies the learning rate by `scale`. Panics for updates whose rate does not depend on sums over the parameter.
    pub(crate) fn scaled(self, scale: f32) -> Self {
        match self {
            Update::Lars(step) => Update::Lars(LarsStep { lr: step.lr * scale, ..step }),
            Update::Lamb(step) => Update::Lamb(AdamWStep { lr: step.lr * scale, ..step }),
            Update::AdafactorVector(step) => {
                Update::AdafactorVector(AdafactorVectorStep { lr: step.lr * scale, ..step })
            }
            update => panic!("{update:?} has no scale"),
        }
    }

    /// Returns the cost of the update with f32 states.
    pub(crate) fn cost(&self) -> ElementCost {
        use ElementAccess::{Change, Read, Skip};
        let (num_operations, parameter, gradient, states) = match self {
            Update::AdamW(_) | Update::Adam(_) => (16, Change, Read, [Change; 2]),
            Update::FrozenAdam(_) => (12, Change, Read, [Change, Read]),
            Update::FrozenAdamFromMomentum(_) => (9, Change, Read, [Change, Read]),
            Update::FrozenAdamMomentum(_) => (4, Change, Skip, [Read, Skip]),
            Update::Momentum(_) | Update::Lars(_) => (7, Change, Read, [Change, Skip]),
            Update::Lion(_) => (11, Change, Read, [Change, Skip]),
            Update::Norms { .. } => (5, Read, Read, [Skip; 2]),
            Update::LambMoments(_) => (21, Read, Read, [Change; 2]),
            Update::Lamb(_) => (9, Change, Skip, [Read; 2]),
            Update::AdafactorVectorMoment(_) => (14, Skip, Read, [Change, Skip]),
            Update::AdafactorVector(_) => (8, Change, Read, [Read, Skip]),
            Update::MuonMomentum(_) => (7, Change, Read, [Change, Skip]),
            Update::Descend { .. } | Update::Sign { .. } => (3, Change, Read, [Skip; 2]),
        };
        ElementCost { num_operations, parameter, gradient, states }
    }

    /// Updates a piece. Returns its sums.
    pub(super) fn run(&self, p: &mut [f32], g: &[f32], piece_states: PieceStates<'_>) -> [f64; 2] {
        let simd_level = piece_states.simd_level;
        const NONE: [f32; 2] = [0.0; 2];
        macro_rules! each {
            (|$p:ident, $g:ident, $m:ident, $v:ident| $run:expr) => {
                piece_states.run(p, g, |$p, $g, $m, $v| {
                    $run;
                    NONE
                })
            };
            (with $c:ident = $corrected:expr; $($each:tt)+) => {{
                let $c = $corrected;
                each!($($each)+)
            }};
        }
        match *self {
            Update::AdamW(step) => {
                each!(with c = AdamCoefficients::new(step); |p, g, m, v| adamw(simd_level, p, g, m, v, c))
            }
            Update::Adam(step) => {
                each!(with c = AdamCoefficients::new(step); |p, g, m, v| adam(simd_level, p, g, m, v, c))
            }
            Update::FrozenAdam(step) => {
                each!(with c = AdamCoefficients::new(step); |p, g, m, v| frozen_adam(simd_level, p, g, m, v, c))
            }
            Update::FrozenAdamFromMomentum(step) => {
                each!(with c = AdamCoefficients::new(step); |p, g, m, v| from_momentum(simd_level, p, g, m, v, c))
            }
            Update::FrozenAdamMomentum(step) => each!(|p, _g, m, _v| to_momentum(simd_level, p, m, step)),
            Update::Momentum(step) => each!(|p, g, m, _v| momentum(simd_level, p, g, m, step)),
            Update::Lion(step) => each!(|p, g, m, _v| lion(simd_level, p, g, m, step)),
            Update::Norms { grad_scale } => {
                piece_states.run(p, g, |p, g, _, _| norms(simd_level, p, g, grad_scale))
            }
            Update::Lars(step) => each!(|p, g, m, _v| lars(simd_level, p, g, m, step)),
            Update::LambMoments(step) => {
                let c = AdamCoefficients::new(step);
                piece_states.run(p, g, |p, g, m, v| lamb_moments(simd_level, p, g, m, v, c))
            }
            Update::Lamb(step) => {
                each!(with c = AdamCoefficients::new(step); |p, _g, m, v| lamb(simd_level, p, m, v, c))
            }
            Update::AdafactorVectorMoment(step) => {
                piece_states.run(p, g, |_, g, v, _| [adafactor_vector_moment(simd_level, g, v, step), 0.0])
            }
            Update::AdafactorVector(step) => each!(|p, g, v, _w| adafactor_vector(simd_level, p, g, v, step)),
            Update::MuonMomentum(step) => each!(|p, g, m, _v| muon_momentum(simd_level, p, g, m, step)),
            Update::Descend { lr, parameter_factor } => {
                each!(|p, g, _m, _v| descend(simd_level, p, g, lr, parameter_factor))
            }
            Update::Sign { lr } => each!(|p, g, _m, _v| step_by_sign(simd_level, p, g, lr)),
        }
    }
}
