use super::Pointwise;
use crate::kernels::sigmoid;

/// The hyperbolic tangent.
#[derive(Debug)]
pub struct Tanh;

/// Below, the Taylor polynomial of degree 7 is nearer to the value than the difference of two numbers near 1.
const SMALL: f32 = 0.15;

impl Pointwise for Tanh {
    const FLOPS: usize = 36;
    const DERIVATIVE_OF_OUTPUT: bool = true;

    #[inline(always)]
    fn value(&self, x: f32) -> f32 {
        let square = x * x;
        let small = x + x * square * (-1.0 / 3.0 + square * (2.0 / 15.0 - square * (17.0 / 315.0)));
        let large = 2.0 * sigmoid(2.0 * x) - 1.0;
        if x.abs() < SMALL { small } else { large }
    }

    #[inline(always)]
    fn derivative(&self, y: f32) -> f32 {
        1.0 - y * y
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_values_are_as_exact_as_large_ones() {
        for exponent in -80..14 {
            let x = 1.37_f32.powi(exponent);
            let exact = f64::from(x).tanh();
            for sign in [1.0, -1.0] {
                let found = f64::from(Tanh.value(sign * x)) * f64::from(sign);
                assert!((found - exact).abs() <= 6e-7 * exact, "{x}: {found} instead of {exact}");
            }
        }
    }
}
