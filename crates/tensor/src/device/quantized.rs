use super::{Device, each};
use crate::kernels::IntegerFormat;
use crate::kernels::cpu::element::with_element;
use crate::tensor::{View, ViewMut};

impl Device {
    /// Writes the message of `x`, in f32, as bytes: rounded to nearest even. A block of it that holds infinity or NaN becomes all NaN.
    ///
    /// # Panics
    /// If the message has not as many bytes as the format gives it.
    pub fn quantize(&self, x: View<'_>, format: IntegerFormat, mut message: ViewMut<'_>) {
        self.count("quantize", each(x.shape(), 4).reads(x.num_bytes()).writes(message.num_bytes()));
        self.cpu.quantize(x.f32s(), format, message.bytes_mut());
    }

    /// Writes the values of a message, rounded to the type of `y`.
    ///
    /// # Panics
    /// As [`quantize`](Device::quantize).
    pub fn dequantize(&self, message: View<'_>, format: IntegerFormat, mut y: ViewMut<'_>) {
        self.count("dequantize", each(y.shape(), 2).reads(message.num_bytes()).writes(y.num_bytes()));
        with_element!(y.dtype() => |T| self.cpu.dequantize::<T>(message.bytes(), format, y.elements()));
    }

    /// `y += x` in f32 for the values `x` of a message.
    ///
    /// # Panics
    /// As [`quantize`](Device::quantize).
    pub fn add_dequantized(&self, message: View<'_>, format: IntegerFormat, mut y: ViewMut<'_>) {
        self.count("add_dequantized", each(y.shape(), 3).reads(message.num_bytes()).updates(y.num_bytes()));
        self.cpu.add_dequantized(message.bytes(), format, y.f32s());
    }
}
