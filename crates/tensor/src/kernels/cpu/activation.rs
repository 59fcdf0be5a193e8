//! Activation functions between two linear layers.

use super::element::Element;
use super::simd::{exp, for_each_simd_level, sigmoid};
use super::{Cpu, SharedSlice};

/// `sqrt(2 / pi)` and the cubic coefficient of GPT-2's approximation of GELU (Hendrycks, Gimpel:
/// "Gaussian error linear units", section 2).
const GELU_SCALE: f32 = 0.797_884_6;
const GELU_CUBIC: f32 = 0.044_715;

/// Squares are cut here, where the sigmoid has long been 0 or 1: an infinite one would make the slope NaN.
const GELU_SQUARE_MAX: f32 = 1e4;

/// GELU and its derivative: `x s` with `s = sigmoid(2 z)`, for `1 + tanh(z) = 2 sigmoid(2 z)`.
#[inline(always)]
fn gelu(x: f32) -> (f32, f32) {
    let square = x * x;
    let square = if square > GELU_SQUARE_MAX { GELU_SQUARE_MAX } else { square };
    let s = 1.0 / (1.0 + exp(-2.0 * GELU_SCALE * x * (1.0 + GELU_CUBIC * square)));
    let slope = 2.0 * GELU_SCALE * (1.0 + 3.0 * GELU_CUBIC * square);
    (x * s, s + x * s * (1.0 - s) * slope)
}

for_each_simd_level! {
    fn gelu_forward<T: Element>(x: &[T], y: &mut [T]) {
        for (y, &x) in y.iter_mut().zip(x) {
            *y = T::from_f32(gelu(x.to_f32()).0);
        }
    }

    fn gelu_backward<T: Element>(x: &mut [T], dy: &mut [T]) {
        for (x, dy) in x.iter_mut().zip(dy) {
            let (y, slope) = gelu(x.to_f32());
            *x = T::from_f32(y);
            *dy = T::from_f32(dy.to_f32() * slope);
        }
    }

    fn swiglu_forward<T: Element>(gate: &[T], up: &[T], y: &mut [T]) {
        for ((y, gate), up) in y.iter_mut().zip(gate).zip(up) {
            let gate = gate.to_f32();
            *y = T::from_f32(gate * sigmoid(gate) * up.to_f32());
        }
    }

    fn swiglu_backward<T: Element>(gate: &mut [T], up: &mut [T], dy: &mut [T]) {
        for ((gate, up), dy) in gate.iter_mut().zip(up).zip(dy) {
            let (gate_value, up_value, d_value) = (gate.to_f32(), up.to_f32(), dy.to_f32());
            let s = sigmoid(gate_value);
            let silu = gate_value * s;
            *dy = T::from_f32(silu * up_value);
            *gate = T::from_f32(d_value * up_value * (s + silu * (1.0 - s)));
            *up = T::from_f32(d_value * silu);
        }
    }
}

impl Cpu {
    /// `y = gelu(x)` with the tanh approximation, elementwise.
    pub(crate) fn gelu<T: Element>(&self, x: &[T], y: &mut [T]) {
        assert_eq!(x.len(), y.len());
        let out = SharedSlice::new(y);
        self.for_row_blocks(x.len(), 1, |first, len| {
            // SAFETY: blocks do not overlap.
            gelu_forward(self.features, &x[first..first + len], unsafe { out.range(first, len) });
        });
    }

    /// In place, given the input `x` and the gradient `dy` of the output: `x` becomes the output and `dy`
    /// the gradient of the input, in one pass, for both need the same exponential.
    pub(crate) fn gelu_backward<T: Element>(&self, x: &mut [T], dy: &mut [T]) {
        assert_eq!(x.len(), dy.len());
        let len = x.len();
        let (x, dy) = (SharedSlice::new(x), SharedSlice::new(dy));
        self.for_row_blocks(len, 1, |first, len| {
            // SAFETY: blocks do not overlap.
            unsafe { gelu_backward(self.features, x.range(first, len), dy.range(first, len)) };
        });
    }

    /// `y = silu(gate) * up` for rows `gate | up` of `2 cols` elements.
    pub(crate) fn swiglu<T: Element>(&self, gate_up: &[T], y: &mut [T], cols: usize) {
        assert_eq!(gate_up.len(), 2 * y.len());
        let out = SharedSlice::new(y);
        self.for_row_blocks(gate_up.len() / (2 * cols), cols, |first, rows| {
            for row in first..first + rows {
                let (gate, up) = gate_up[row * 2 * cols..(row + 1) * 2 * cols].split_at(cols);
                // SAFETY: rows do not overlap.
                swiglu_forward(self.features, gate, up, unsafe { out.range(row * cols, cols) });
            }
        });
    }

    /// In place, given the input rows `gate | up` and the gradient `dy` of the output: `gate_up` becomes
    /// its own gradient and `dy` the output, in one pass.
    pub(crate) fn swiglu_backward<T: Element>(&self, gate_up: &mut [T], dy: &mut [T], cols: usize) {
        assert_eq!(gate_up.len(), 2 * dy.len());
        let rows = gate_up.len() / (2 * cols);
        let (gate_up, dy) = (SharedSlice::new(gate_up), SharedSlice::new(dy));
        self.for_row_blocks(rows, cols, |first, rows| {
            for row in first..first + rows {
                // SAFETY: rows do not overlap.
                let (gate_up, dy) =
                    unsafe { (gate_up.range(row * 2 * cols, 2 * cols), dy.range(row * cols, cols)) };
                let (gate, up) = gate_up.split_at_mut(cols);
                swiglu_backward(self.features, gate, up, dy);
            }
        });
    }
}

#[cfg(test)]
mod tests;
