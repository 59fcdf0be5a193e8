use crate::device::Expr;
use crate::tape::Pointwise;
use trireme_base::Cost;

/// `x / (1 + e^-x)` (Elfwing, Uchibe, Doya 2017), also called swish.
#[derive(Debug, Clone, Copy)]
pub struct Silu;

impl Pointwise for Silu {
    const OPERATIONS: usize = Cost::EXP + 3;
    const DERIVATIVE_OF_OUTPUT: bool = false;

    fn value<'f>(&self, x: Expr<'f>) -> Expr<'f> {
        x * x.sigmoid()
    }

    fn derivative<'f>(&self, x: Expr<'f>) -> Expr<'f> {
        let s = x.sigmoid();
        s + x * s * (1.0 - s)
    }
}
