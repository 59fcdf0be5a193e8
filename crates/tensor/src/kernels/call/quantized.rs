//! Quantization to integers and 8-bit floats.

use super::{array_structs, kernel_calls, per_element_cost, plain_arguments};
use crate::fp8::{Fp8Scale, Fp8Scaling};
use crate::kernels::IntegerFormat;
use crate::shape::Shape;
use crate::view::{View, ViewMut};
use trireme_base::{Cost, DType};

kernel_calls! {
    /// Quantization to integers and 8-bit floats.
    QuantizedCall {
        /// Quantizes the f32 values `x`, rounded to nearest even, into the bytes of a message. A block with an infinity or a NaN becomes
        /// all NaN.
        ///
        /// # Panics
        /// If `message` does not have the length that `format` determines.
        pub fn quantize => Quantize { x: View, format: IntegerFormat, message: ViewMut;
            check_message(message.num_bytes(), format, x.shape());
        }

        /// Writes the values of a message to `y`, rounded to the dtype of `y`. The message has as many values as `y`.
        ///
        /// # Panics
        /// If `message` does not have the length that `format` determines.
        pub fn dequantize => Dequantize { message: View, format: IntegerFormat, y: ViewMut;
            check_message(message.num_bytes(), format, y.shape());
        }

        /// Computes `y += x` in f32 for the values `x` of a message.
        ///
        /// # Panics
        /// If `message` does not have the length that `format` determines.
        pub fn add_dequantized => AddDequantized { message: View, format: IntegerFormat, y: ViewMut;
            check_message(message.num_bytes(), format, y.shape());
        }

        /// Writes the fp8 codes of `x * s` for the scale `s` to `codes`, u8, rounded to nearest even and saturated. `reciprocal`, an f32,
        /// becomes `1 / s`. `amax`, an f32, becomes the maximum of itself and the largest finite `|x|`. `own_amax`, an f32, is scratch
        /// memory, which is needed if the scale is unknown.
        ///
        /// Panics if the shapes differ, if `codes` is not u8, or without scratch memory that is needed.
        pub(crate) fn quantize_fp8 => QuantizeFp8 {
            x: View, scale: Fp8Scale, codes: ViewMut, reciprocal: ViewMut, amax: Option<ViewMut>, own_amax: Option<ViewMut>;
            assert_eq!((x.shape(), codes.dtype()), (codes.shape(), DType::U8));
            assert!(scale.is_known() || own_amax.is_some(), "no scale, and no memory for the largest value");
        }

        /// Decodes `codes`, u8, which `quantize_fp8` wrote, to `y`, bf16. Exact.
        ///
        /// Panics if the shapes differ, or for other dtypes.
        pub(crate) fn dequantize_fp8 => DequantizeFp8 { codes: View, scaling: Fp8Scaling<View>, y: ViewMut;
            assert_eq!(codes.shape(), y.shape());
            assert_eq!((codes.dtype(), y.dtype()), (DType::U8, DType::Bf16));
        }
    }
}

plain_arguments! { Fp8Scale, IntegerFormat }
array_structs! { Fp8Scaling }

/// Panics if a message of values of this shape does not have as many bytes.
fn check_message(num_bytes: usize, format: IntegerFormat, values: Shape) {
    let len = values.num_elements();
    assert_eq!(num_bytes, format.num_bytes(len), "a message of {len} elements");
}

/// Operations of a quantization to fp8 per element: the product with the scale, clamping, rounding, and the amax.
const FP8_OPERATIONS: usize = 6;

impl QuantizedCall {
    pub(crate) fn cost(&self) -> Cost {
        match self {
            Self::Quantize { x, message, .. } => {
                per_element_cost(x.shape(), 4).reads(x.num_bytes()).writes(message.num_bytes())
            }
            Self::Dequantize { message, y, .. } => {
                per_element_cost(y.shape(), 2).reads(message.num_bytes()).writes(y.num_bytes())
            }
            Self::AddDequantized { message, y, .. } => {
                per_element_cost(y.shape(), 3).reads(message.num_bytes()).updates(y.num_bytes())
            }
            Self::QuantizeFp8 { x, codes, scale, .. } => {
                let cost = per_element_cost(x.shape(), FP8_OPERATIONS)
                    .reads(x.num_bytes())
                    .writes(codes.num_bytes());
                // If the scale is unknown, a first pass computes the amax, and a second pass overwrites its output.
                if scale.is_known() { cost } else { cost + cost }
            }
            Self::DequantizeFp8 { codes, y, .. } => {
                per_element_cost(y.shape(), 2).reads(codes.num_bytes()).writes(y.num_bytes())
            }
        }
    }
}
