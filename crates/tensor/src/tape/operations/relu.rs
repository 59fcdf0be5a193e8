use crate::device::Expr;
use crate::tape::Pointwise;

/// `max(x, 0)`, with derivative 0 at 0. NaN stays NaN.
#[derive(Debug, Clone, Copy)]
pub struct Relu;

impl Pointwise for Relu {
    const OPERATIONS: usize = 1;
    const DERIVATIVE_OF_OUTPUT: bool = true;

    fn value<'f>(&self, x: Expr<'f>) -> Expr<'f> {
        x.max(0.0)
    }

    fn derivative<'f>(&self, y: Expr<'f>) -> Expr<'f> {
        Expr::from(0.0).if_less(y, 1.0, 0.0)
    }
}
