//! Formats of 8-bit floats (Micikevicius et al., "FP8 formats for deep learning", 2022), and the power-of-two factors that scale values
//! into their range.

/// A signed 8-bit floating-point format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
}
