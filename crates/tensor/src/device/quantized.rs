//! Rounding to integers and to 8-bit floats, on a device.

use super::Device;
use crate::fp8::Fp8Scale;
use crate::kernels::IntegerFormat;
use crate::kernels::call::QuantizedCall;
use crate::tensor::{View, ViewMut};

impl Device {
    /// Writes the message of `x`, in f32, as bytes: rounded to nearest even. A block of it that holds infinity or NaN becomes all NaN.
    ///
    /// # Panics
    /// If the message has not as many bytes as the format gives it.
    pub fn quantize(&self, x: View<'_>, format: IntegerFormat, message: ViewMut<'_>) {
        self.issue(QuantizedCall::Quantize { x: x.operand(), message: message.into_operand(), format });
    }

    /// Writes the values of a message, which are as many as `y` has, rounded to the type of `y`.
    ///
    /// # Panics
    /// As [`quantize`](Device::quantize).
    pub fn dequantize(&self, message: View<'_>, format: IntegerFormat, y: ViewMut<'_>) {
        self.issue(QuantizedCall::Dequantize { message: message.operand(), y: y.into_operand(), format });
    }

    /// `y += x` in f32 for the values `x` of a message.
    ///
    /// # Panics
    /// As [`quantize`](Device::quantize).
    pub fn add_dequantized(&self, message: View<'_>, format: IntegerFormat, y: ViewMut<'_>) {
        let (message, y) = (message.operand(), y.into_operand());
        self.issue(QuantizedCall::AddDequantized { message, y, format });
    }

    /// `y = fp8(x * s) / s` for the scale `s`, elementwise, rounded to nearest even and saturated; `y` is bf16. The largest finite
    /// `|x|` is taken into `amax`, an f32, unless it holds a larger one.
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
