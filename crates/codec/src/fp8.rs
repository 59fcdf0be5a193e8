//! The codecs `fp8_e4m3` and `fp8_e5m2`: 8-bit floats (Micikevicius et al., "FP8 formats for deep learning", 2022) with
//! one scale for each message.
//!
//! A message consists of the reciprocal of the scale (f32) and one byte for each element. The scale is the largest
//! power of two that keeps the largest finite magnitude within the range of the format, so scaling does not change
//! mantissas. E4M3 has no infinity and sends NaN instead.

use super::error::Result;
use super::vector_ops::{INFINITY_BITS, largest_finite_magnitude, magnitude_bits};
use super::{Codec, RoundContext};
use trireme_base::{Fp8Format, power_of_two};

const SCALE_BYTES: usize = size_of::<f32>();

/// Number of elements that are summed over all ranks at a time, so that they stay in cache.
const PIECE_LEN: usize = 1024;

pub(super) const fn message_bytes(len: usize) -> usize {
    SCALE_BYTES + len
}

/// Conversion between f32 and a format with `FRACTION_BITS` bits of fraction.
struct Code<const FRACTION_BITS: u32>;

impl<const FRACTION_BITS: u32> Code<FRACTION_BITS> {
    const BIAS: u32 = (1 << (6 - FRACTION_BITS)) - 1;
    /// E5M2 reserves the highest exponent for infinity and NaN, as IEEE 754 does. E4M3 uses it for numbers, except for
    /// one code, NaN.
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

    const VALUES: &[f32; 256] = &{
        let mut values = [0.0; 256];
        let mut code = 0;
        while code < values.len() {
            values[code] = Self::value(code as u8);
            code += 1;
        }
        values
    };

    /// Rounds to the nearest code, ties to even. Finite values stay finite. There are no branches, so that loops are
    /// vectorized.
    #[inline(always)]
    fn of(value: f32) -> u8 {
        let (sign, magnitude) = ((value.to_bits() >> 24) & 0x80, magnitude_bits(value));
        let rounding_increment = (1 << (Self::SHIFT - 1)) - 1 + ((magnitude >> Self::SHIFT) & 1);
        let normal = magnitude.wrapping_sub(Self::REBIAS).wrapping_add(rounding_increment) >> Self::SHIFT;
        let subnormal = (f32::from_bits(magnitude) + Self::ROUNDING_ADDEND)
            .to_bits()
            .wrapping_sub(Self::ROUNDING_ADDEND.to_bits());
        let finite = if magnitude < Self::NORMAL_MIN { subnormal } else { normal };
        let special = if magnitude > INFINITY_BITS { Self::NAN } else { Self::INFINITY };
        (sign | if magnitude >= INFINITY_BITS { special } else { finite.min(Self::LARGEST) }) as u8
    }

    const fn value(code: u8) -> f32 {
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

    fn encode(scale_exponent: i32, values: &mut [f32], message: &mut [u8]) {
        let (scale, reciprocal) = (power_of_two(scale_exponent), power_of_two(-scale_exponent));
        let (header, codes) = message.split_at_mut(SCALE_BYTES);
        header.copy_from_slice(&reciprocal.to_le_bytes());
        for (value, code) in values.iter_mut().zip(codes) {
            *code = Self::of(*value * scale);
            *value -= Self::VALUES[usize::from(*code)] * reciprocal;
        }
    }

    fn add(message: &[u8], start: usize, sums: &mut [f32]) {
        let (header, codes) = message.split_at(SCALE_BYTES);
        let reciprocal = f32::from_le_bytes(header.try_into().expect("a scale has four bytes"));
        for (sum, &code) in sums.iter_mut().zip(&codes[start..]) {
            *sum += Self::VALUES[usize::from(code)] * reciprocal;
        }
    }
}

#[derive(Debug)]
pub(super) struct Fp8 {
    pub(super) format: Fp8Format,
}

impl Codec for Fp8 {
    fn encode(&mut self, _context: &RoundContext, values: &mut [f32], message: &mut [u8]) {
        let scale_exponent = self.format.scale_exponent(largest_finite_magnitude(values)).clamp(-126, 126);
        match self.format {
            Fp8Format::E4m3 => Code::<3>::encode(scale_exponent, values, message),
            Fp8Format::E5m2 => Code::<2>::encode(scale_exponent, values, message),
        }
    }

    fn decode(&mut self, _context: &RoundContext, result: &[u8], gradient: &mut [f32]) -> Result<()> {
        let num_bytes = message_bytes(gradient.len());
        for (piece, sums) in gradient.chunks_mut(PIECE_LEN).enumerate() {
            sums.fill(0.0);
            for message in result.chunks_exact(num_bytes) {
                match self.format {
                    Fp8Format::E4m3 => Code::<3>::add(message, piece * PIECE_LEN, sums),
                    Fp8Format::E5m2 => Code::<2>::add(message, piece * PIECE_LEN, sums),
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert_eq!(Code::<FRACTION_BITS>::value(Code::<FRACTION_BITS>::LARGEST as u8), largest);
        for code in 0..=u8::MAX {
            let value = Code::<FRACTION_BITS>::value(code);
            match defined(FRACTION_BITS as i32, code) {
                Some(expected) => assert_eq!(f64::from(value).to_bits(), expected.to_bits(), "{code:#x}"),
                None => assert!(!value.is_finite(), "{code:#x} is {value}"),
            }
            assert!(value.is_nan() || Code::<FRACTION_BITS>::of(value) == code, "{code:#x}");
        }
        // A value halfway between two neighbors is rounded to the even code; the next values below and above are not
        // ties.
        for code in 0..Code::<FRACTION_BITS>::LARGEST as u8 {
            let (low, high) = (Code::<FRACTION_BITS>::value(code), Code::<FRACTION_BITS>::value(code + 1));
            let halfway = (low + high) / 2.0;
            let even = code + (code & 1);
            for (value, expected) in
                [(halfway.next_down(), code), (halfway, even), (halfway.next_up(), code + 1)]
            {
                assert_eq!(Code::<FRACTION_BITS>::of(value), expected, "{value}");
                assert_eq!(Code::<FRACTION_BITS>::of(-value), expected | 0x80, "{value}");
            }
        }
        for value in [largest * 1.5, f32::MAX] {
            assert_eq!(Code::<FRACTION_BITS>::value(Code::<FRACTION_BITS>::of(value)), largest);
        }
        for value in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            assert!(!Code::<FRACTION_BITS>::value(Code::<FRACTION_BITS>::of(value)).is_finite());
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

    #[test]
    fn the_scale_uses_the_range_and_changes_no_digit() {
        for amax in [448.0, 449.0, 1.0, 1e-30, 3e38, 1e-35] {
            let mut values = [amax, -amax / 2.0, 0.0, f32::NAN];
            let mut message = [0; message_bytes(4)];
            let scale_exponent = Fp8Format::E4m3.scale_exponent(amax).clamp(-126, 126);
            Code::<3>::encode(scale_exponent, &mut values, &mut message);
            let mut sums = [0.0; 4];
            Code::<3>::add(&message, 0, &mut sums);
            assert!((sums[0] - amax).abs() <= amax / 16.0, "{amax}: {sums:?}");
            assert!((sums[0] + values[0]).to_bits() == amax.to_bits() && sums[3].is_nan(), "{amax}");
            let code = message[SCALE_BYTES] & 0x7f;
            assert!(code >> 3 >= 14, "{amax} has the code {code:#x}, and not one of the highest exponents");
        }
    }
}
