//! Quantization to integers and 8-bit floats.

use super::Device;
use crate::fp8::Fp8Scale;
use crate::kernels::IntegerFormat;
use crate::kernels::call::QuantizedCall;
use crate::tensor::{View, ViewMut};

impl Device {
    /// Quantizes the f32 values `x`, rounded to nearest even, into the bytes of a message. A block with an infinity or a NaN becomes all
    /// NaN.
    ///
    /// # Panics
    /// If `message` does not have the length that `format` determines.
    pub fn quantize(&self, x: View<'_>, format: IntegerFormat, message: ViewMut<'_>) {
        self.issue(QuantizedCall::Quantize { x: x.operand(), message: message.into_operand(), format });
    }

    /// Writes the values of a message to `y`, rounded to the dtype of `y`. The message has as many values as `y`.
    ///
    /// # Panics
    /// If `message` does not have the length that `format` determines.
    pub fn dequantize(&self, message: View<'_>, format: IntegerFormat, y: ViewMut<'_>) {
        self.issue(QuantizedCall::Dequantize { message: message.operand(), y: y.into_operand(), format });
    }

    /// Computes `y += x` in f32 for the values `x` of a message.
    ///
    /// # Panics
    /// If `message` does not have the length that `format` determines.
    pub fn add_dequantized(&self, message: View<'_>, format: IntegerFormat, y: ViewMut<'_>) {
        let (message, y) = (message.operand(), y.into_operand());
        self.issue(QuantizedCall::AddDequantized { message, y, format });
    }

    /// Computes `y = fp8(x * s) / s` for the scale `s`, elementwise, rounded to nearest even and saturated. `y` is bf16. `amax`, an f32,
    /// becomes the maximum of itself and the largest finite `|x|`.
    ///
    /// Panics if the shapes differ.
    pub(crate) fn quantize_fp8(
        &self,
        x: View<'_>,
        scale: Fp8Scale,
        y: ViewMut<'_>,
        amax: Option<ViewMut<'_>>,
    ) {
        assert_eq!(x.shape(), y.shape());
        let (x, y, amax) = (x.operand(), y.into_operand(), amax.map(ViewMut::into_operand));
        self.issue(QuantizedCall::QuantizeFp8 { x, y, amax, scale });
    }
}
