//! Quantization to integers and 8-bit floats.

use super::{each, kernel_calls};
use crate::fp8::Fp8Scale;
use crate::kernels::{IntegerFormat, Operand, OperandMut};
use trireme_base::Cost;

kernel_calls! {
    /// Quantization to integers and 8-bit floats.
    QuantizedCall {
        "quantize" => Quantize { x: Operand, message: OperandMut; format: IntegerFormat }
        "dequantize" => Dequantize { message: Operand, y: OperandMut; format: IntegerFormat }
        "add_dequantized" => AddDequantized { message: Operand, y: OperandMut; format: IntegerFormat }
        "quantize_fp8" => QuantizeFp8 { x: Operand, y: OperandMut, amax: Option<OperandMut>; scale: Fp8Scale }
    }
}

/// Operations of a quantization to fp8 per element: two products with the scale, clamping, and the amax.
const FP8_OPERATIONS: usize = 6;

impl QuantizedCall {
    pub(crate) fn cost(&self) -> Cost {
        match self {
            Self::Quantize { x, message, .. } => {
                each(x.shape(), 4).reads(x.num_bytes()).writes(message.num_bytes())
            }
            Self::Dequantize { message, y, .. } => {
                each(y.shape(), 2).reads(message.num_bytes()).writes(y.num_bytes())
            }
            Self::AddDequantized { message, y, .. } => {
                each(y.shape(), 3).reads(message.num_bytes()).updates(y.num_bytes())
            }
            Self::QuantizeFp8 { x, y, scale, .. } => {
                let cost = each(x.shape(), FP8_OPERATIONS).reads(x.num_bytes()).writes(y.num_bytes());
                // An unknown scale needs a first pass for the amax, whose output is overwritten.
                if scale.is_known() { cost } else { cost + cost }
            }
        }
    }
}
