use crate::tape::ElementLoss;

/// `(x - target)^2`; with [`MeanLoss`](crate::tape::MeanLoss), the mean squared error.
#[derive(Debug, Clone, Copy)]
pub struct SquaredError;

impl ElementLoss for SquaredError {
    const OPERATIONS: usize = 2;

    #[inline(always)]
    fn value(&self, x: f32, target: f32) -> f32 {
        (x - target) * (x - target)
    }

    #[inline(always)]
    fn derivative(&self, x: f32, target: f32) -> f32 {
        2.0 * (x - target)
    }
}
