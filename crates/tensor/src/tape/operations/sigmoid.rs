use crate::device::Expr;
use crate::tape::Pointwise;
use trireme_base::Cost;

/// `1 / (1 + e^-x)`.
#[derive(Debug, Clone, Copy)]
pub struct Sigmoid;

impl Pointwise for Sigmoid {
    const OPERATIONS: usize = Cost::EXP + 2;
    const DERIVATIVE_OF_OUTPUT: bool = true;

    fn value<'f>(&self, x: Expr<'f>) -> Expr<'f> {
        x.sigmoid()
    }

    fn derivative<'f>(&self, y: Expr<'f>) -> Expr<'f> {
        y * (1.0 - y)
    }
}
