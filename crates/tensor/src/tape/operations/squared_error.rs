use crate::device::Expr;
use crate::tape::ElementLoss;

/// `(x - target)^2`; with [`MeanLoss`](crate::tape::MeanLoss), the mean squared error.
#[derive(Debug, Clone, Copy)]
pub struct SquaredError;

impl ElementLoss for SquaredError {
    const OPERATIONS: usize = 2;

    fn value<'f>(&self, x: Expr<'f>, target: Expr<'f>) -> Expr<'f> {
        (x - target) * (x - target)
    }

    fn derivative<'f>(&self, x: Expr<'f>, target: Expr<'f>) -> Expr<'f> {
        2.0 * (x - target)
    }
}
