use crate::device::Expr;
use crate::tape::Pointwise;

/// The hyperbolic tangent.
#[derive(Debug, Clone, Copy)]
pub struct Tanh;

impl Pointwise for Tanh {
    const OPERATIONS: usize = 36;
    const DERIVATIVE_OF_OUTPUT: bool = true;

    fn value<'f>(&self, x: Expr<'f>) -> Expr<'f> {
        x.tanh()
    }

    fn derivative<'f>(&self, y: Expr<'f>) -> Expr<'f> {
        1.0 - y * y
    }
}
