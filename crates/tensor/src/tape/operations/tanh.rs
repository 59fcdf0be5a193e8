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

#[cfg(test)]
mod tests {
    use crate::kernels::tanh;

    #[test]
    fn small_values_are_as_exact_as_large_ones() {
        for exponent in -80..14 {
            let x = 1.37_f32.powi(exponent);
            let exact = f64::from(x).tanh();
            for sign in [1.0, -1.0] {
                let found = f64::from(tanh(sign * x)) * f64::from(sign);
                assert!((found - exact).abs() <= 6e-7 * exact, "{x}: {found} instead of {exact}");
            }
        }
    }
}
