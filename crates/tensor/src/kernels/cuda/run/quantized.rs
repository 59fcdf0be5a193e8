use super::super::Cuda;
use super::super::launch::{Argument, Words, pair};
use crate::fp8::{Fp8Scale, Fp8Scaling, SCALE_EXPONENT_MAX};
use crate::kernels::call::QuantizedCall;
use crate::kernels::{IntegerFormat, Operand, OperandMut};

impl Argument for IntegerFormat {
    fn append(&self, to: &mut Words) -> usize {
        (*self == IntegerFormat::Int4).append(to)
    }
}

/// `Fp8` of `sources/quantized.cu`.
impl Argument for Fp8Scale {
    const CHANGES: bool = true;

    fn append(&self, to: &mut Words) -> usize {
        let (fraction_bits, _, max) = self.format().limits();
        let exponent = self.exponent().unwrap_or(0);
        pair(max.to_bits(), fraction_bits).append(to)
            + pair(exponent as u32, self.margin()).append(to)
            + pair(SCALE_EXPONENT_MAX as u32, 0).append(to)
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
            QuantizedCall::QuantizeFp8 { x, codes, reciprocal, amax, scale, own_amax } => {
                let own_amax = own_amax.as_ref().filter(|_| !scale.is_known());
                if let Some(own) = own_amax {
                    self.fill(own, 0);
                    let launch = self.kernel("fp8_amax", &[x.dtype()]).arg(x).arg(own);
                    launch.over_elements(x.shape());
                }
                let launch = self.kernel("quantize_fp8", &[x.dtype()]).arg(x).arg(*scale).arg(own_amax);
                launch.arg(amax).arg(reciprocal).arg(codes).over_elements(x.shape());
            }
            QuantizedCall::DequantizeFp8 { codes, scaling, y } => self.dequantize_fp8(*codes, scaling, y),
        }
    }

    pub(in super::super) fn dequantize_fp8(
        &self,
        codes: Operand,
        scaling: &Fp8Scaling<Operand>,
        y: &OperandMut,
    ) {
        let (fraction_bits, ..) = scaling.format.limits();
        let launch = self.kernel("dequantize_fp8", &[]).arg(codes).arg(scaling.reciprocal).arg(fraction_bits);
        launch.arg(y).over_elements(y.shape());
    }
}
