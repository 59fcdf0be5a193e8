//! Activation functions.

use super::element::Element;
use super::simd::{exp, for_each_simd_level, sigmoid};
use super::{Cpu, SharedSlice};
use trireme_base::Cost;

/// An activation function of hidden values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// GELU with the tanh approximation of GPT-2 (Hendrycks, Gimpel: "Gaussian error linear units", 2016, section 2).
    Gelu,
    /// Exact GELU: `x` times the cumulative normal distribution at `x`.
    ExactGelu,
    /// `x sigmoid(x)` (Elfwing et al., 2017).
    Silu,
}

impl Activation {
    pub(crate) fn num_operations(self) -> usize {
        match self {
            Activation::Gelu => Cost::EXP + 8,
            Activation::ExactGelu => Cost::EXP + 20,
            Activation::Silu => Cost::EXP + 3,
        }
    }
}

/// An [`Activation`] as a type for which kernels are compiled.
trait ActivationFunction {
    /// Returns the value and the derivative at `x`.
    fn at(x: f32) -> (f32, f32);
}

struct Gelu;
struct ExactGelu;
struct Silu;

impl ActivationFunction for Gelu {
    #[inline(always)]
    fn at(x: f32) -> (f32, f32) {
        const SCALE: f32 = 0.797_884_6; // sqrt(2 / pi)
        const CUBIC: f32 = 0.044_715;
        // Clamped far beyond the values at which the sigmoid rounds to 0 or 1, because an infinite square would make the slope NaN.
        const SQUARE_MAX: f32 = 1e4;
        let square = x * x;
        let square = if square > SQUARE_MAX { SQUARE_MAX } else { square };
        // 1 + tanh(z) = 2 sigmoid(2 z).
        let s = 1.0 / (1.0 + exp(-2.0 * SCALE * x * (1.0 + CUBIC * square)));
        let slope = 2.0 * SCALE * (1.0 + 3.0 * CUBIC * square);
        (x * s, s + x * s * (1.0 - s) * slope)
    }
}

impl ActivationFunction for ExactGelu {
    /// Uses the complementary error function in the rational Chebyshev approximation of Press et al. ("Numerical recipes", section 6.2).
    /// The relative error is below 1.2e-7, also in the tails.
    #[inline(always)]
    fn at(x: f32) -> (f32, f32) {
        const COEFFICIENTS: [f32; 9] = [
            -0.822_152_23,
            1.488_515_9,
            -1.135_204,
            0.278_868_07,
            -0.186_288_06,
            0.096_784_18,
            0.374_091_96,
            1.000_023_7,
            -1.265_512_2,
        ];
        const ROOT_OF_HALF: f32 = std::f32::consts::FRAC_1_SQRT_2;
        const DENSITY: f32 = 0.398_942_3; // 1 / sqrt(2 pi)
        // Beyond 20, the tail is 0. NaN is kept.
        let z = x.abs() * ROOT_OF_HALF;
        let z = if z > 20.0 { 20.0 } else { z };
        let square = z * z;
        // The second factor corrects for the rounding error of the square.
        let bell = exp(-square) * (1.0 - z.mul_add(z, -square));
        let t = 1.0 / (1.0 + 0.5 * z);
        let polynomial = COEFFICIENTS.into_iter().fold(0.170_872_77, |sum: f32, c| sum.mul_add(t, c));
        let tail = 0.5 * t * exp(polynomial) * bell;
        let distribution = if x < 0.0 { tail } else { 1.0 - tail };
        (x * distribution, distribution + x * (DENSITY * bell))
    }
}

impl ActivationFunction for Silu {
    #[inline(always)]
    fn at(x: f32) -> (f32, f32) {
        let s = sigmoid(x);
        let y = x * s;
        (y, s + y * (1.0 - s))
    }
}

/// Evaluates an expression with `$curve` as the type of an activation.
macro_rules! with_activation {
    ($activation:expr => |$curve:ident| $body:expr) => {
        match $activation {
            Activation::Gelu => {
                type $curve = Gelu;
                $body
            }
            Activation::ExactGelu => {
                type $curve = ExactGelu;
                $body
            }
            Activation::Silu => {
                type $curve = Silu;
                $body
            }
        }
    };
}

for_each_simd_level! {
    fn forward<T: Element, C: ActivationFunction>(x: &[T], y: &mut [T]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = T::from_f32(C::at(x.to_f32()).0);
        }
    }

    fn backward<T: Element, C: ActivationFunction>(x: &mut [T], dy: &mut [T]) {
        for (x, dy) in x.iter_mut().zip(dy) {
            let (y, slope) = C::at(x.to_f32());
            *x = T::from_f32(y);
            *dy = T::from_f32(dy.to_f32() * slope);
        }
    }

    fn gated_forward<T: Element, C: ActivationFunction>(gate: &[T], up: &[T], y: &mut [T]) {
        for ((y, gate), up) in y.iter_mut().zip(gate).zip(up) {
            *y = T::from_f32(C::at(gate.to_f32()).0 * up.to_f32());
        }
    }

    fn gated_backward<T: Element, C: ActivationFunction>(gate: &mut [T], up: &mut [T], dy: &mut [T]) {
        for ((gate, up), dy) in gate.iter_mut().zip(up).zip(dy) {
            let (up_value, d_value) = (up.to_f32(), dy.to_f32());
            let (value, slope) = C::at(gate.to_f32());
            *dy = T::from_f32(value * up_value);
            *gate = T::from_f32(d_value * up_value * slope);
            *up = T::from_f32(d_value * value);
        }
    }
}

impl Cpu {
    pub(crate) fn activate<T: Element>(&self, activation: Activation, x: &[T], y: &mut [T]) {
        assert_eq!(x.len(), y.len());
        with_activation!(activation => |C| self.for_each_block(y, |first, y| {
            forward::<T, C>(self.simd_level, &x[first..first + y.len()], y);
        }));
    }

    /// Replaces the input `x` by the output and the output gradient `dy` by the input gradient. One pass, because both need the same
    /// exponential.
    pub(crate) fn activate_backward<T: Element>(&self, activation: Activation, x: &mut [T], dy: &mut [T]) {
        assert_eq!(x.len(), dy.len());
        let len = x.len();
        let (x, dy) = (SharedSlice::new(x), SharedSlice::new(dy));
        with_activation!(activation => |C| self.for_row_blocks(len, 1, |first, len| {
            // SAFETY: blocks do not overlap.
            unsafe { backward::<T, C>(self.simd_level, x.range(first, len), dy.range(first, len)) };
        }));
    }

    /// Computes `y = activation(gate) * up` for rows `gate | up` of `2 cols` elements (Shazeer, "GLU variants improve transformer", 2020).
    pub(crate) fn gate<T: Element>(&self, activation: Activation, gate_up: &[T], y: &mut [T], cols: usize) {
        assert_eq!(gate_up.len(), 2 * y.len());
        with_activation!(activation => |C| self.for_each_row(y, cols, |row, y| {
            let (gate, up) = gate_up[row * 2 * cols..(row + 1) * 2 * cols].split_at(cols);
            gated_forward::<T, C>(self.simd_level, gate, up, y);
        }));
    }

    /// Replaces the rows `gate | up` of `gate_up` by their gradient and the output gradient `dy` by the output, in one pass.
    pub(crate) fn gate_backward<T: Element>(
        &self,
        activation: Activation,
        gate_up: &mut [T],
        dy: &mut [T],
        cols: usize,
    ) {
        assert_eq!(gate_up.len(), 2 * dy.len());
        let rows = gate_up.len() / (2 * cols);
        let (gate_up, dy) = (SharedSlice::new(gate_up), SharedSlice::new(dy));
        with_activation!(activation => |C| self.for_row_blocks(rows, cols, |first, rows| {
            for row in first..first + rows {
                // SAFETY: rows do not overlap.
                let (gate_up, dy) =
                    unsafe { (gate_up.range(row * 2 * cols, 2 * cols), dy.range(row * cols, cols)) };
                let (gate, up) = gate_up.split_at_mut(cols);
                gated_backward::<T, C>(self.simd_level, gate, up, dy);
            }
        }));
    }
}

#[cfg(test)]
mod tests;
