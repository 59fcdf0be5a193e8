//! Optimizer updates, one pass over parameters, gradients and state.

use super::simd::for_each_simd_level;
use super::{Cpu, SharedSlice};

/// The numbers of one AdamW update (Loshchilov, Hutter: "Decoupled weight decay regularization", algorithm 2).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWStep {
    /// Learning rate of this step.
    pub lr: f32,
    /// Decay rate of the first moment.
    pub beta1: f32,
    /// Decay rate of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub epsilon: f32,
    /// Decoupled decay; 0 for parameters that do not decay.
    pub weight_decay: f32,
    /// Every gradient is multiplied by this first: mean over microbatches, and clipping.
    pub grad_scale: f32,
    /// Number of this step, from 1: corrects the moments' bias.
    pub step: u64,
}

/// The numbers of one SGD update with momentum (as PyTorch defines it: dampening 0).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MomentumStep {
    /// Learning rate of this step.
    pub lr: f32,
    /// Decay rate of the velocity; 0 for plain SGD.
    pub momentum: f32,
    /// Step along `gradient + momentum * velocity` (Nesterov) instead of along the velocity.
    pub nesterov: bool,
    /// Added to the gradient as `weight_decay * parameter`.
    pub weight_decay: f32,
    /// Every gradient is multiplied by this first.
    pub grad_scale: f32,
    /// Number of this step, from 1: the first sets the velocity to the gradient.
    pub step: u64,
}

for_each_simd_level! {
    fn adamw(parameters: &mut [f32], grads: &[f32], first: &mut [f32], second: &mut [f32], s: AdamWStep) {
        let correction1 = (1.0 - f64::from(s.beta1).powf(s.step as f64)) as f32;
        let correction2 = (1.0 - f64::from(s.beta2).powf(s.step as f64)) as f32;
        let step_size = s.lr / correction1;
        let root2 = 1.0 / correction2.sqrt();
        let keep = 1.0 - s.lr * s.weight_decay;
        for (((p, &g), m), v) in parameters.iter_mut().zip(grads).zip(first).zip(second) {
            let g = g * s.grad_scale;
            *m = s.beta1 * *m + (1.0 - s.beta1) * g;
            *v = s.beta2 * *v + (1.0 - s.beta2) * g * g;
            *p = *p * keep - step_size * *m / (v.sqrt() * root2 + s.epsilon);
        }
    }

    fn momentum(parameters: &mut [f32], grads: &[f32], velocity: &mut [f32], s: MomentumStep) {
        for ((p, &g), v) in parameters.iter_mut().zip(grads).zip(velocity) {
            let g = g * s.grad_scale + s.weight_decay * *p;
            *v = if s.step == 1 { g } else { s.momentum * *v + g };
            *p -= s.lr * if s.nesterov { g + s.momentum * *v } else { *v };
        }
    }
}

impl Cpu {
    /// One AdamW update; the four slices have one length.
    pub(crate) fn adamw(
        &self,
        parameters: &mut [f32],
        grads: &[f32],
        first: &mut [f32],
        second: &mut [f32],
        step: AdamWStep,
    ) {
        let len = grads.len();
        assert!(parameters.len() == len && first.len() == len && second.len() == len);
        let parameters = SharedSlice::new(parameters);
        let (first, second) = (SharedSlice::new(first), SharedSlice::new(second));
        self.for_row_blocks(len, 1, |start, len| {
            // SAFETY: blocks do not overlap.
            let (p, m, v) =
                unsafe { (parameters.range(start, len), first.range(start, len), second.range(start, len)) };
            adamw(self.features, p, &grads[start..start + len], m, v, step);
        });
    }

    /// One SGD update with momentum; the three slices have one length.
    pub(crate) fn momentum(
        &self,
        parameters: &mut [f32],
        grads: &[f32],
        velocity: &mut [f32],
        step: MomentumStep,
    ) {
        let len = grads.len();
        assert!(parameters.len() == len && velocity.len() == len);
        let (parameters, velocity) = (SharedSlice::new(parameters), SharedSlice::new(velocity));
        self.for_row_blocks(len, 1, |start, len| {
            // SAFETY: blocks do not overlap.
            let (p, v) = unsafe { (parameters.range(start, len), velocity.range(start, len)) };
            momentum(self.features, p, &grads[start..start + len], v, step);
        });
    }
}

#[cfg(test)]
mod tests;
