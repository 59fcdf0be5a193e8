//! 16-bit floats. They are storage formats: arithmetic is done in f32.
//!
//! The conversions have neither branches nor calls, so the compiler can vectorize loops over them. The conversions of the `half` crate
//! check at every call which instructions the CPU supports, which prevents vectorization.

use crate::DType;
use bytemuck::{Pod, Zeroable};
use std::fmt::Debug;

/// A floating-point storage format. Arithmetic on its values is done in f32.
pub trait Float: Pod + Debug + PartialEq + Send + Sync {
    /// The corresponding dtype.
    const DTYPE: DType;

    /// Rounds to the nearest value, ties to even.
    fn from_f32(value: f32) -> Self;

    /// Converts to f32, exactly.
    fn to_f32(self) -> f32;
}

impl Float for f32 {
    const DTYPE: DType = DType::F32;

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }

    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
}

/// bfloat16: the upper half of an f32, with 8 bits of exponent and 7 of fraction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Pod, Zeroable)]
#[repr(transparent)]
pub struct Bf16(u16);

/// IEEE 754 half precision: 5 bits of exponent, 10 of fraction; the largest finite value is 65504.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Pod, Zeroable)]
#[repr(transparent)]
pub struct F16(u16);

impl Bf16 {
    /// Rounds to the nearest value, ties to even. Values that are too large become infinite, and NaN stays NaN.
    #[inline(always)]
    pub const fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
        let quiet = (bits >> 16) | 0x40;
        Bf16(if bits & 0x7fff_ffff > 0x7f80_0000 { quiet } else { rounded } as u16)
    }

    /// Converts to f32, exactly.
    #[inline(always)]
    pub const fn to_f32(self) -> f32 {
        f32::from_bits((self.0 as u32) << 16)
    }
}

impl F16 {
    /// Rounds to the nearest value, ties to even. Magnitudes from 65520 on become infinite, and NaN stays NaN.
    #[inline(always)]
    pub const fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        let (sign, magnitude) = ((bits >> 16) & 0x8000, bits & 0x7fff_ffff);
        // The exponent biases differ by 112. The last 13 bits of the fraction are rounded off.
        let rebiased = magnitude.wrapping_sub(112 << 23);
        let normal = rebiased.wrapping_add(0xfff + ((magnitude >> 13) & 1)) >> 13;
        // The spacing of subnormal values is 2^-24, which is the spacing of f32 values from 0.5 to 1.
        let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0.5_f32.to_bits());
        let finite = if magnitude < 0x3880_0000 { subnormal } else { normal };
        let huge = if magnitude > 0x7f80_0000 { 0x7e00 } else { 0x7c00 };
        F16((sign | if magnitude >= 0x477f_f000 { huge } else { finite }) as u16)
    }

    /// Converts to f32, exactly.
    #[inline(always)]
    pub const fn to_f32(self) -> f32 {
        let (sign, magnitude) = (((self.0 as u32) & 0x8000) << 16, (self.0 as u32) & 0x7fff);
        // Multiplying by 2^112 corrects the exponent, also of subnormal values.
        let finite = (f32::from_bits(magnitude << 13) * f32::from_bits((112 + 127) << 23)).to_bits();
        let bits = if magnitude >= 0x7c00 { (magnitude << 13) | 0x7f80_0000 } else { finite };
        f32::from_bits(sign | bits)
    }
}

macro_rules! half {
    ($half:ident) => {
        impl $half {
            /// Returns the value with these bits.
            pub const fn from_bits(bits: u16) -> Self {
                $half(bits)
            }

            /// Returns the bits of the value.
            pub const fn to_bits(self) -> u16 {
                self.0
            }
        }

        impl Float for $half {
            const DTYPE: DType = DType::$half;

            #[inline(always)]
            fn from_f32(value: f32) -> Self {
                $half::from_f32(value)
            }

            #[inline(always)]
            fn to_f32(self) -> f32 {
                self.to_f32()
            }
        }
    };
}

half!(Bf16);
half!(F16);

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the bits of the value nearest to `value` by binary search, ties to even. `decode` maps bits to values, and `infinity` is the
    /// bits of infinity.
    fn nearest(value: f64, decode: impl Fn(u16) -> f32, infinity: u16) -> u16 {
        let (sign, value) = (if value.is_sign_negative() { 0x8000 } else { 0 }, value.abs());
        // In rounding, infinity counts as the value that would follow the largest finite value.
        let at = |bits: u16| {
            if bits < infinity {
                return f64::from(decode(bits));
            }
            2.0 * f64::from(decode(infinity - 1)) - f64::from(decode(infinity - 2))
        };
        let mut low = 0;
        let mut high = infinity;
        while high - low > 1 {
            let middle = (low + high) / 2;
            if at(middle) <= value { low = middle } else { high = middle }
        }
        if value >= at(high) {
            return sign | infinity;
        }
        let (below, above) = (value - at(low), at(high) - value);
        let up = above < below || (above == below && low & 1 == 1);
        sign | if up { high } else { low }
    }

    #[test]
    fn every_value_survives_a_round_trip() {
        for bits in 0..=u16::MAX {
            let (narrow, wide) = (Bf16::from_bits(bits), Bf16::from_bits(bits).to_f32());
            assert!(wide.is_nan() || Bf16::from_f32(wide) == narrow, "{bits:#x}");
            assert!(!wide.is_nan() || Bf16::from_f32(wide).to_f32().is_nan(), "{bits:#x}");
            let (narrow, wide) = (F16::from_bits(bits), F16::from_bits(bits).to_f32());
            assert!(wide.is_nan() || F16::from_f32(wide) == narrow, "{bits:#x}");
            assert!(!wide.is_nan() || F16::from_f32(wide).to_f32().is_nan(), "{bits:#x}");
        }
    }

    #[test]
    fn f16_decodes_as_the_standard_says() {
        for (bits, value) in [
            (0x3c00, 1.0),
            (0xc000, -2.0),
            (0x7bff, 65504.0),
            (0x0400, 6.103_515_6e-5),
            (0x0001, 5.960_464_5e-8),
            (0x8001, -5.960_464_5e-8),
            (0x3555, 0.333_251_95),
            (0x7c00, f32::INFINITY),
            (0xfc00, f32::NEG_INFINITY),
            (0x0000, 0.0),
        ] {
            assert_eq!(F16::from_bits(bits).to_f32(), value, "{bits:#x}");
        }
        assert!(F16::from_bits(0x7c01).to_f32().is_nan());
    }

    #[test]
    fn rounding_is_to_the_nearest_even() {
        // Tests every exponent, fractions around the rounding points, and both signs.
        for high in 0..=0xffff_u32 {
            for low in [0, 1, 0x0fff, 0x1000, 0x1001, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let value = f32::from_bits(high << 16 | low);
                if value.is_nan() {
                    assert!(
                        Bf16::from_f32(value).to_f32().is_nan() && F16::from_f32(value).to_f32().is_nan()
                    );
                    continue;
                }
                let wide = f64::from(value);
                let expected = nearest(wide, |bits| Bf16::from_bits(bits).to_f32(), 0x7f80);
                assert_eq!(Bf16::from_f32(value).to_bits(), expected, "{value:e} as bf16");
                let expected = nearest(wide, |bits| F16::from_bits(bits).to_f32(), 0x7c00);
                assert_eq!(F16::from_f32(value).to_bits(), expected, "{value:e} as f16");
            }
        }
    }
}
