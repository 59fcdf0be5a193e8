use super::Cpu;
use crate::kernels::call::QuantizedCall;
use crate::kernels::cpu::element::with_element;
use trireme_base::power_of_two;

impl Cpu {
    pub(super) fn run_quantized(&self, call: QuantizedCall) {
        match call {
            QuantizedCall::Quantize { x, mut message, format } => {
                self.quantize(x.f32s(self), format, message.bytes(self));
            }
            QuantizedCall::Dequantize { message, mut y, format } => with_element!(y.dtype() => |T| {
                self.dequantize::<T>(message.bytes(self), format, y.elements(self));
            }),
            QuantizedCall::AddDequantized { message, mut y, format } => {
                self.add_dequantized(message.bytes(self), format, y.f32s(self));
            }
            QuantizedCall::QuantizeFp8 { x, mut codes, mut reciprocal, mut amax, scale, .. } => {
                with_element!(x.dtype() => |T| {
                    let mut round = |exponent| {
                        self.quantize_fp8::<T>(x.elements(self), codes.bytes(self), scale.format(), exponent)
                    };
                    let exponent = scale.exponent().unwrap_or_else(|| scale.exponent_for(round(0)));
                    let found = round(exponent);
                    reciprocal.f32s(self)[0] = power_of_two(-exponent);
                    if let Some(amax) = &mut amax {
                        let amax = &mut amax.f32s(self)[0];
                        *amax = amax.max(found);
                    }
                })
            }
            QuantizedCall::DequantizeFp8 { codes, scaling, mut y } => {
                let reciprocal = scaling.reciprocal.f32s(self)[0];
                self.dequantize_fp8(codes.bytes(self), reciprocal, scaling.format, y.elements(self));
            }
        }
    }
}
