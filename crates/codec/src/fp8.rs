//! The codecs `fp8_e4m3` and `fp8_e5m2`: 8-bit floats (Micikevicius et al., "FP8 formats for deep learning", 2022) with
//! one scale for each message.
//!
//! A message consists of the reciprocal of the scale (f32) and one byte for each element. The scale is the largest
//! power of two that keeps the largest finite magnitude within the range of the format, so scaling does not change
//! mantissas. E4M3 has no infinity and sends NaN instead.

use super::error::Result;
use super::vector_ops::largest_finite_magnitude;
use super::{Codec, RoundContext};
use trireme_base::{Fp8Codes, Fp8Format, power_of_two};

const SCALE_BYTES: usize = size_of::<f32>();

/// Number of elements that are summed over all ranks at a time, so that they stay in cache.
const PIECE_LEN: usize = 1024;

pub(super) const fn message_bytes(len: usize) -> usize {
    SCALE_BYTES + len
}

/// Encodes `values` as a message, and leaves the rounding errors in `values`.
fn encode<const FRACTION_BITS: u32>(scale_exponent: i32, values: &mut [f32], message: &mut [u8]) {
    let (scale, reciprocal) = (power_of_two(scale_exponent), power_of_two(-scale_exponent));
    let (header, codes) = message.split_at_mut(SCALE_BYTES);
    header.copy_from_slice(&reciprocal.to_le_bytes());
    for (value, code) in values.iter_mut().zip(codes) {
        *code = Fp8Codes::<FRACTION_BITS>::from_f32(*value * scale);
        *value -= Fp8Codes::<FRACTION_BITS>::VALUES[usize::from(*code)] * reciprocal;
    }
}

/// Decodes the elements of a message from index `start` on, and adds them to `sums`.
fn add<const FRACTION_BITS: u32>(message: &[u8], start: usize, sums: &mut [f32]) {
    let (header, codes) = message.split_at(SCALE_BYTES);
    let reciprocal = f32::from_le_bytes(header.try_into().expect("a scale has four bytes"));
    for (sum, &code) in sums.iter_mut().zip(&codes[start..]) {
        *sum += Fp8Codes::<FRACTION_BITS>::VALUES[usize::from(code)] * reciprocal;
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
            Fp8Format::E4m3 => encode::<3>(scale_exponent, values, message),
            Fp8Format::E5m2 => encode::<2>(scale_exponent, values, message),
        }
    }

    fn decode(&mut self, _context: &RoundContext, result: &[u8], gradient: &mut [f32]) -> Result<()> {
        let num_bytes = message_bytes(gradient.len());
        for (piece, sums) in gradient.chunks_mut(PIECE_LEN).enumerate() {
            sums.fill(0.0);
            for message in result.chunks_exact(num_bytes) {
                match self.format {
                    Fp8Format::E4m3 => add::<3>(message, piece * PIECE_LEN, sums),
                    Fp8Format::E5m2 => add::<2>(message, piece * PIECE_LEN, sums),
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scale_uses_the_range_and_changes_no_digit() {
        for amax in [448.0, 449.0, 1.0, 1e-30, 3e38, 1e-35] {
            let mut values = [amax, -amax / 2.0, 0.0, f32::NAN];
            let mut message = [0; message_bytes(4)];
            let scale_exponent = Fp8Format::E4m3.scale_exponent(amax).clamp(-126, 126);
            encode::<3>(scale_exponent, &mut values, &mut message);
            let mut sums = [0.0; 4];
            add::<3>(&message, 0, &mut sums);
            assert!((sums[0] - amax).abs() <= amax / 16.0, "{amax}: {sums:?}");
            assert!((sums[0] + values[0]).to_bits() == amax.to_bits() && sums[3].is_nan(), "{amax}");
            let code = message[SCALE_BYTES] & 0x7f;
            assert!(code >> 3 >= 14, "{amax} has the code {code:#x}, and not one of the highest exponents");
        }
    }
}
