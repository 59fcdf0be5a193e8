//! The codecs `int8` and `int4`: QSGD (Alistarh, Grubic, Li, Tomioka, Vojnovic: "QSGD: communication-efficient SGD via
//! gradient quantization and encoding", 2017). Values are stochastically rounded to small integers, with the largest
//! magnitude of each block as its scale (section 4 of the paper). The quantization is unbiased.
//!
//! A message consists of one scale (f32) for each block, and then the codes: signed bytes, or two codes in a byte, the
//! first one in the low bits. A block with values that are not finite has the scale NaN. A block whose largest
//! magnitude is below 1e-36 is sent as zeros, because the reciprocal of its quantization step would overflow.

use super::error::Result;
use super::vector_ops::{INFINITY_BITS, largest_magnitude_bits};
use super::{Codec, RoundContext};
use trireme_base::RandomKey;

/// The width of a code in bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Bits {
    Four,
    Eight,
}

impl Bits {
    /// The largest code; the smallest is its negative.
    const fn levels(self) -> f32 {
        match self {
            Bits::Four => 7.0,
            Bits::Eight => 127.0,
        }
    }

    const fn code_bytes(self, num_codes: usize) -> usize {
        match self {
            Bits::Four => num_codes.div_ceil(2),
            Bits::Eight => num_codes,
        }
    }
}

const SCALE_BYTES: usize = size_of::<f32>();

/// Smaller scales are treated as 0.
const SCALE_MIN: f32 = 1e-36;

/// Number of elements that are quantized at a time. Block lengths are multiples of it.
const PIECE_LEN: usize = 64;

pub(super) const fn message_bytes(len: usize, bits: Bits, block_len: usize) -> usize {
    len.div_ceil(block_len) * SCALE_BYTES + bits.code_bytes(len)
}

#[derive(Debug)]
pub(super) struct Quantized {
    pub(super) bits: Bits,
    pub(super) block_len: usize,
}

impl Codec for Quantized {
    fn encode(&mut self, context: &RoundContext, values: &mut [f32], message: &mut [u8]) {
        let num_pieces = values.len().div_ceil(PIECE_LEN) as u64;
        let mut piece =
            context.step.wrapping_mul(context.world_size as u64).wrapping_add(context.rank as u64);
        piece = piece.wrapping_mul(num_pieces);
        let (scales, codes) = message.split_at_mut(values.len().div_ceil(self.block_len) * SCALE_BYTES);
        let blocks =
            values.chunks_mut(self.block_len).zip(codes.chunks_mut(self.bits.code_bytes(self.block_len)));
        for ((values, codes), scale_bytes) in blocks.zip(scales.chunks_exact_mut(SCALE_BYTES)) {
            let scale = scale_of(values);
            scale_bytes.copy_from_slice(&scale.to_le_bytes());
            let pieces = values.chunks_mut(PIECE_LEN).zip(codes.chunks_mut(self.bits.code_bytes(PIECE_LEN)));
            for (values, code_bytes) in pieces {
                let codes = quantize(values, scale, self.bits.levels(), uniform(context.key, piece));
                pack(self.bits, &codes, code_bytes);
                piece = piece.wrapping_add(1);
            }
        }
    }

    fn decode(&mut self, _context: &RoundContext, result: &[u8], gradient: &mut [f32]) -> Result<()> {
        let num_bytes = message_bytes(gradient.len(), self.bits, self.block_len);
        let scales_bytes = gradient.len().div_ceil(self.block_len) * SCALE_BYTES;
        for (block, sums) in gradient.chunks_mut(self.block_len).enumerate() {
            sums.fill(0.0);
            for message in result.chunks_exact(num_bytes) {
                let (scales, codes) = message.split_at(scales_bytes);
                let scale = scales.as_chunks::<SCALE_BYTES>().0[block];
                let unit = f32::from_le_bytes(scale) / self.bits.levels();
                let codes = &codes[self.bits.code_bytes(block * self.block_len)..];
                add(self.bits, unit, codes, sums);
            }
        }
        Ok(())
    }
}

/// Returns the largest magnitude: 0 if it is below [`SCALE_MIN`], NaN if a value is not finite.
fn scale_of(values: &[f32]) -> f32 {
    match largest_magnitude_bits(values) {
        INFINITY_BITS.. => f32::NAN,
        bits if f32::from_bits(bits) < SCALE_MIN => 0.0,
        bits => f32::from_bits(bits),
    }
}

/// Returns 16 random bits for each element of a piece.
fn uniform(key: RandomKey, piece: u64) -> [u16; PIECE_LEN] {
    const COUNTERS: usize = PIECE_LEN / 8;
    let first = piece.wrapping_mul(COUNTERS as u64);
    let words: [[u32; 4]; COUNTERS] =
        std::array::from_fn(|index| key.words(first.wrapping_add(index as u64)));
    bytemuck::cast(words)
}

/// Returns the codes of the values, and replaces the values by their compression errors.
#[inline(always)]
fn quantize(values: &mut [f32], scale: f32, levels: f32, random: [u16; PIECE_LEN]) -> [i8; PIECE_LEN] {
    let (per_unit, unit) = (if scale > 0.0 { levels / scale } else { 0.0 }, scale / levels);
    let mut codes = [0; PIECE_LEN];
    for ((value, code), random) in values.iter_mut().zip(&mut codes).zip(random) {
        // The shift makes values positive, so that the conversion to an integer rounds down. `max` turns NaN into 0.
        let shifted = *value * per_unit + (levels + f32::from(random) / 65_536.0);
        let rounded = shifted.max(0.0).min(2.0 * levels) as i32 - levels as i32;
        *code = rounded as i8;
        *value -= rounded as f32 * unit;
    }
    codes
}

fn pack(bits: Bits, codes: &[i8; PIECE_LEN], bytes: &mut [u8]) {
    match bits {
        Bits::Eight => bytes.copy_from_slice(bytemuck::cast_slice(&codes[..bytes.len()])),
        Bits::Four => {
            for (byte, pair) in bytes.iter_mut().zip(codes.as_chunks::<2>().0) {
                *byte = (pair[0] as u8 & 0x0f) | (pair[1] as u8) << 4;
            }
        }
    }
}

fn add(bits: Bits, unit: f32, codes: &[u8], sums: &mut [f32]) {
    match bits {
        Bits::Eight => {
            for (sum, &code) in sums.iter_mut().zip(codes) {
                *sum += f32::from(code as i8) * unit;
            }
        }
        Bits::Four => {
            let (pairs, rest) = sums.as_chunks_mut::<2>();
            let low = |byte: u8| f32::from((byte << 4) as i8 >> 4) * unit;
            for (pair, &byte) in pairs.iter_mut().zip(codes) {
                pair[0] += low(byte);
                pair[1] += f32::from(byte as i8 >> 4) * unit;
            }
            if let [sum] = rest {
                *sum += low(codes[pairs.len()]);
            }
        }
    }
}
