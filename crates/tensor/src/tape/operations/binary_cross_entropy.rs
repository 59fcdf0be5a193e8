use crate::device::Expr;
use crate::tape::ElementLoss;

/// The cross-entropy of the probability `1 / (1 + e^-x)` and a target between 0 and 1, computed from the logit `x`. It stays finite for any
/// finite `x`.
#[derive(Debug, Clone, Copy)]
pub struct BinaryCrossEntropyWithLogits;

impl ElementLoss for BinaryCrossEntropyWithLogits {
    const OPERATIONS: usize = 60;

    fn value<'f>(&self, x: Expr<'f>, target: Expr<'f>) -> Expr<'f> {
        x.max(0.0) - x * target + (-x.abs()).exp().ln_1p()
    }

    fn derivative<'f>(&self, x: Expr<'f>, target: Expr<'f>) -> Expr<'f> {
        x.sigmoid() - target
    }
}
