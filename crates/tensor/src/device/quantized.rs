//! Rounding to integers and to 8-bit floats, on a device.

use super::{Device, each};
use crate::fp8::Fp8Scale;
use crate::kernels::IntegerFormat;
use crate::kernels::cpu::element::with_element;
use crate::tensor::{View, ViewMut};

impl Device {
    /// Writes the message of `x`, in f32, as bytes: rounded to nearest even. A block of it that holds infinity or NaN becomes all NaN.
    ///
    /// # Panics
    /// If the message has not as many bytes as the format gives it.
    pub fn quantize(&self, x: View<'_>, format: IntegerFormat, message: ViewMut<'_>) {
        let cost = each(x.shape(), 4).reads(x.num_bytes()).writes(message.num_bytes());
        let (x, mut message) = (x.place(), message.into_place());
        self.issue("quantize", cost, move |cpu| cpu.quantize(x.f32s(cpu), format, message.bytes(cpu)));
    }

    /// Writes the values of a message, which are as many as `y` has, rounded to the type of `y`.
    ///
    /// # Panics
    /// As [`quantize`](Device::quantize).
    pub fn dequantize(&self, message: View<'_>, format: IntegerFormat, y: ViewMut<'_>) {
        let cost = each(y.shape(), 2).reads(message.num_bytes()).writes(y.num_bytes());
        let (message, mut y) = (message.place(), y.into_place());
        self.issue("dequantize", cost, move |cpu| {
            with_element!(y.dtype() => |T| cpu.dequantize::<T>(message.bytes(cpu), format, y.elements(cpu)));
        });
    }

    /// `y += x` in f32 for the values `x` of a message.
    ///
    /// # Panics
    /// As [`quantize`](Device::quantize).
    pub fn add_dequantized(&self, message: View<'_>, format: IntegerFormat, y: ViewMut<'_>) {
        let cost = each(y.shape(), 3).reads(message.num_bytes()).updates(y.num_bytes());
        let (message, mut y) = (message.place(), y.into_place());
        self.issue("add_dequantized", cost, move |cpu| {
            cpu.add_dequantized(message.bytes(cpu), format, y.f32s(cpu));
        });
    }

    /// `y = fp8(x * s) / s` for the scale `s`, elementwise, rounded to nearest even and saturated; `y` is bf16. The largest finite
    /// `|x|` is taken into `amax`, an f32, unless it holds a larger one.
    ///
    /// # Panics
    /// If the shapes differ.
    pub(crate) fn quantize_fp8(
        &self,
        x: View<'_>,
        scale: Fp8Scale,
        y: ViewMut<'_>,
        amax: Option<ViewMut<'_>>,
    ) {
        assert_eq!(x.shape(), y.shape());
        let cost = each(x.shape(), FP8_OPERATIONS).reads(x.num_bytes()).writes(y.num_bytes());
        // A pass that only finds the amax comes first; what it writes is written over.
        let cost = if scale.is_known() { cost } else { cost + cost };
        let (x, mut y, mut amax) = (x.place(), y.into_place(), amax.map(ViewMut::into_place));
        self.issue("quantize_fp8", cost, move |cpu| {
            with_element!(x.dtype() => |T| {
                let mut round = |exponent| {
                    cpu.quantize_fp8::<T>(x.elements(cpu), y.elements(cpu), scale.format(), exponent)
                };
                let exponent = scale.exponent().unwrap_or_else(|| scale.exponent_for(round(0)));
                let found = round(exponent);
                if let Some(amax) = &mut amax {
                    let amax = &mut amax.f32s(cpu)[0];
                    *amax = amax.max(found);
                }
            });
        });
    }
}

/// Of a rounding to fp8: two products with the scale, limits, and the amax.
const FP8_OPERATIONS: usize = 6;
