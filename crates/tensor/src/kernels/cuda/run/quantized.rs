use super::super::Cuda;
use super::super::launch::{Argument, Words, pair};
use crate::fp8::{Fp8Scale, SCALE_EXPONENT_MAX};
use crate::kernels::IntegerFormat;
use crate::kernels::call::QuantizedCall;
use crate::kernels::cpu::fp8::Rounding;

impl Argument for IntegerFormat {
    fn append(&self, to: &mut Words) -> usize {
        (*self == IntegerFormat::Int4).append(to)
    }
}

/// `Fp8` of `sources/quantized.cu`.
impl Argument for Fp8Scale {
    fn append(&self, to: &mut Words) -> usize {
        let exponent = self.exponent().unwrap_or(0);
        let Rounding { max, normal_min, rounder_offset, .. } = Rounding::new(self.format(), exponent);
        pair(max.to_bits(), normal_min).append(to)
            + pair(rounder_offset, exponent as u32).append(to)
            + pair(self.margin(), SCALE_EXPONENT_MAX as u32).append(to)
    }
}

impl Cuda {
    pub(super) fn run_quantized(&self, call: &QuantizedCall) {
        match call {
            QuantizedCall::Quantize { x, message, format } => {
                let len = x.shape().num_elements();
                let launch = self.kernel("quantize", &[]).arg(x).arg(*format).arg(message).arg(len);
                launch.over_rows(len.div_ceil(IntegerFormat::BLOCK_LEN));
            }
            QuantizedCall::Dequantize { message, y, format } => {
                let launch = self.kernel("dequantize", &[y.dtype()]).arg(message).arg(*format);
                launch.arg(y).over_elements(y.shape());
            }
            QuantizedCall::AddDequantized { message, y, format } => {
                let launch = self.kernel("add_dequantized", &[]).arg(message).arg(*format);
                launch.arg(y).over_elements(y.shape());
            }
            QuantizedCall::QuantizeFp8 { x, y, amax, scale, own_amax } => {
                let own_amax = own_amax.as_ref().filter(|_| !scale.is_known());
                if let Some(own) = own_amax {
                    self.fill(own, 0);
                    let launch = self.kernel("fp8_amax", &[x.dtype()]).arg(x).arg(own);
                    launch.over_elements(x.shape());
                }
                let launch = self.kernel("quantize_fp8", &[x.dtype()]).arg(x).arg(*scale).arg(own_amax);
                launch.arg(amax).arg(y).over_elements(x.shape());
            }
        }
    }
}
