//! Formats of 8-bit floats (Micikevicius et al., "FP8 formats for deep learning", 2022), their codes, and the power-of-two factors that
//! scale values into their range.

/// A signed 8-bit floating-point format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Fp8Format {
    /// 4 bits of exponent, 3 of fraction. Positive values range from 2^-9 (subnormal) to 448.
    E4m3,
    /// 5 bits of exponent, 2 of fraction. Positive values range from 2^-16 (subnormal) to 57344.
    E5m2,
}

impl Fp8Format {
    /// Returns the number of fraction bits, the exponent of the smallest normal value, and the largest finite value.
    pub const fn limits(self) -> (u32, i32, f32) {
        match self {
            Fp8Format::E4m3 => (3, -6, 448.0),
            Fp8Format::E5m2 => (2, -14, 57_344.0),
        }
    }

    /// Returns the exponent of the largest power of two whose product with `amax` is at most the largest finite value.
    pub fn scale_exponent(self, amax: f32) -> i32 {
        let (.., max) = self.limits();
        // In f64 the quotient of two f32 values is exact enough that it is never rounded up to a power of two.
        floor_log2(f64::from(max) / f64::from(amax))
    }
}

/// Conversions between f32 and the codes of a format with `FRACTION_BITS` bits of fraction.
#[derive(Debug)]
pub struct Fp8Codes<const FRACTION_BITS: u32>;

/// The codes of [`Fp8Format::E4m3`].
pub type E4m3Codes = Fp8Codes<3>;

/// The codes of [`Fp8Format::E5m2`].
pub type E5m2Codes = Fp8Codes<2>;

/// Bits of an infinity. Larger magnitudes are NaN.
const INFINITY_BITS: u32 = f32::INFINITY.to_bits();

impl<const FRACTION_BITS: u32> Fp8Codes<FRACTION_BITS> {
    const BIAS: u32 = (1 << (6 - FRACTION_BITS)) - 1;
    /// E5M2 reserves the highest exponent for infinity and NaN, as IEEE 754 does. E4M3 uses it for numbers, except for one code, NaN.
    const HAS_INFINITY: bool = FRACTION_BITS == 2;
    const LARGEST: u32 = if Self::HAS_INFINITY { 0x7b } else { 0x7e };
    const INFINITY: u32 = Self::LARGEST + 1;
    const NAN: u32 = 0x7f;
    /// Number of fraction bits of an f32 that rounding removes.
    const SHIFT: u32 = 23 - FRACTION_BITS;
    /// The difference of the exponent biases, at the position of the exponent in an f32.
    const REBIAS: u32 = (127 - Self::BIAS) << 23;
    const NORMAL_MIN: u32 = (128 - Self::BIAS) << 23;
    /// The distance between neighboring subnormal values.
    const UNIT: f32 = power_of_two(1 - Self::BIAS as i32 - FRACTION_BITS as i32);
    /// A number whose unit in the last place is `UNIT`. Adding it to a value rounds the value to a multiple of `UNIT`.
    const ROUNDING_ADDEND: f32 = Self::UNIT * power_of_two(23);

    /// The largest finite value.
    pub const MAX: f32 = Self::to_f32(Self::LARGEST as u8);

    /// The value of each code.
    pub const VALUES: &[f32; 256] = &{
        let mut values = [0.0; 256];
        let mut code = 0;
        while code < values.len() {
            values[code] = Self::to_f32(code as u8);
            code += 1;
        }
        values
    };

    /// Rounds to the nearest code, ties to even. Finite values beyond the range saturate; an infinity becomes infinity, or NaN in E4M3; NaN
    /// stays NaN. There are no branches, so that loops are vectorized.
    #[inline(always)]
    pub fn from_f32(value: f32) -> u8 {
        let (sign, magnitude) = ((value.to_bits() >> 24) & 0x80, value.to_bits() & 0x7fff_ffff);
        let rounding_increment = (1 << (Self::SHIFT - 1)) - 1 + ((magnitude >> Self::SHIFT) & 1);
        let normal = magnitude.wrapping_sub(Self::REBIAS).wrapping_add(rounding_increment) >> Self::SHIFT;
        let subnormal = (f32::from_bits(magnitude) + Self::ROUNDING_ADDEND)
            .to_bits()
            .wrapping_sub(Self::ROUNDING_ADDEND.to_bits());
        let finite = if magnitude < Self::NORMAL_MIN { subnormal } else { normal };
        let special = if magnitude > INFINITY_BITS { Self::NAN } else { Self::INFINITY };
        (sign | if magnitude >= INFINITY_BITS { special } else { finite.min(Self::LARGEST) }) as u8
    }

    /// Returns the value of a code.
    #[inline(always)]
    pub const fn to_f32(code: u8) -> f32 {
        let (sign, magnitude) = ((code as u32 & 0x80) << 24, code as u32 & 0x7f);
        let bits = if magnitude > Self::LARGEST {
            let is_infinity = Self::HAS_INFINITY && magnitude == Self::INFINITY;
            if is_infinity { INFINITY_BITS } else { f32::NAN.to_bits() }
        } else if magnitude < 1 << FRACTION_BITS {
            (magnitude as f32 * Self::UNIT).to_bits()
        } else {
            (magnitude << Self::SHIFT) + Self::REBIAS
        };
        f32::from_bits(sign | bits)
    }
}

/// Returns `2^exponent`, for the exponents of normal f32 values: -126 to 127.
#[inline(always)]
pub const fn power_of_two(exponent: i32) -> f32 {
    f32::from_bits(((127 + exponent) as u32) << 23)
}

/// Returns the exponent of the largest power of two that is at most `positive`, which must be a positive normal number. Returns 1024 for
/// infinity.
pub fn floor_log2(positive: f64) -> i32 {
    (positive.to_bits() >> 52) as i32 - 1023
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exponent_is_rounded_down() {
        for (value, expected) in [(1.0, 0), (1.999, 0), (0.5, -1), (448.0, 8), (f64::INFINITY, 1024)] {
            assert_eq!(floor_log2(value), expected);
        }
        assert_eq!((power_of_two(-126), power_of_two(3)), (f32::MIN_POSITIVE, 8.0));
    }

    /// The value of a code by the definition in the paper; `None` for infinity and NaN.
    fn defined(fraction_bits: i32, code: u8) -> Option<f64> {
        let bias = (1 << (6 - fraction_bits)) - 1;
        let (exponent, fraction) =
            (i32::from(code & 0x7f) >> fraction_bits, i32::from(code) % (1 << fraction_bits));
        let is_special = if fraction_bits == 2 { exponent == 31 } else { code & 0x7f == 0x7f };
        let fraction = f64::from(fraction) / 2.0_f64.powi(fraction_bits);
        let magnitude = match exponent {
            0 => fraction * 2.0_f64.powi(1 - bias),
            _ => (1.0 + fraction) * 2.0_f64.powi(exponent - bias),
        };
        (!is_special).then_some(if code & 0x80 == 0 { magnitude } else { -magnitude })
    }

    fn check<const FRACTION_BITS: u32>(largest: f32) {
        assert_eq!(Fp8Codes::<FRACTION_BITS>::to_f32(Fp8Codes::<FRACTION_BITS>::LARGEST as u8), largest);
        for code in 0..=u8::MAX {
            let value = Fp8Codes::<FRACTION_BITS>::to_f32(code);
            match defined(FRACTION_BITS as i32, code) {
                Some(expected) => assert_eq!(f64::from(value).to_bits(), expected.to_bits(), "{code:#x}"),
                None => assert!(!value.is_finite(), "{code:#x} is {value}"),
            }
            assert!(value.is_nan() || Fp8Codes::<FRACTION_BITS>::from_f32(value) == code, "{code:#x}");
        }
        // A value halfway between two neighbors is rounded to the even code; the next values below and above are not
        // ties.
        for code in 0..Fp8Codes::<FRACTION_BITS>::LARGEST as u8 {
            let (low, high) =
                (Fp8Codes::<FRACTION_BITS>::to_f32(code), Fp8Codes::<FRACTION_BITS>::to_f32(code + 1));
            let halfway = (low + high) / 2.0;
            let even = code + (code & 1);
            for (value, expected) in
                [(halfway.next_down(), code), (halfway, even), (halfway.next_up(), code + 1)]
            {
                assert_eq!(Fp8Codes::<FRACTION_BITS>::from_f32(value), expected, "{value}");
                assert_eq!(Fp8Codes::<FRACTION_BITS>::from_f32(-value), expected | 0x80, "{value}");
            }
        }
        for value in [largest * 1.5, f32::MAX] {
            assert_eq!(
                Fp8Codes::<FRACTION_BITS>::to_f32(Fp8Codes::<FRACTION_BITS>::from_f32(value)),
                largest
            );
        }
        for value in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            assert!(
                !Fp8Codes::<FRACTION_BITS>::to_f32(Fp8Codes::<FRACTION_BITS>::from_f32(value)).is_finite()
            );
        }
    }

    #[test]
    fn codes_match_the_paper() {
        for (format, check, largest) in
            [(Fp8Format::E4m3, check::<3> as fn(f32), 448.0), (Fp8Format::E5m2, check::<2>, 57_344.0)]
        {
            assert_eq!(format.limits().2, largest);
            check(largest);
        }
    }
}
