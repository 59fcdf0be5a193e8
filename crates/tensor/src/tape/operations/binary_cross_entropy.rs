use crate::kernels::sigmoid;
use crate::tape::ElementLoss;

/// The cross-entropy of the probability `1 / (1 + e^-x)` and a target between 0 and 1, computed from the logit `x`. It stays finite for any
/// finite `x`.
#[derive(Debug, Clone, Copy)]
pub struct BinaryCrossEntropyWithLogits;

impl ElementLoss for BinaryCrossEntropyWithLogits {
    const OPERATIONS: usize = 60;

    #[inline(always)]
    fn value(&self, x: f32, target: f32) -> f32 {
        x.max(0.0) - x * target + (-x.abs()).exp().ln_1p()
    }

    #[inline(always)]
    fn derivative(&self, x: f32, target: f32) -> f32 {
        sigmoid(x) - target
    }
}
