//! The codec `one_bit`: the sign of each element (Seide, Fu, Droppo, Li, Yu: "1-bit stochastic gradient descent and its
//! application to data-parallel distributed training of speech DNNs", 2014). A sign is decoded to the mean of the
//! values with that sign in its block, which minimizes the squared error. The codec needs error feedback (Karimireddy,
//! Rebjock, Stich, Jaggi: "Error feedback fixes SignSGD and other gradient compression schemes", 2019).
//!
//! A message consists of two f32 for each block, the means of the values without and with a minus sign, and then one
//! bit for each element: 1 for a minus, lowest bit first.

use super::error::Result;
use super::{Codec, RoundContext};

const MEANS_BYTES: usize = 2 * size_of::<f32>();

const LANES: usize = 16;

pub(super) const fn message_bytes(len: usize, block_len: usize) -> usize {
    len.div_ceil(block_len) * MEANS_BYTES + len.div_ceil(8)
}

/// The values that the two signs of a block are decoded to. The mean of no values is 0. The mean of values that include
/// NaN or infinity is not finite.
#[derive(Debug, Clone, Copy)]
struct Means {
    plus: f32,
    minus: f32,
}

#[derive(Debug)]
pub(super) struct OneBit {
    pub(super) block_len: usize,
}

impl Codec for OneBit {
    fn encode(&mut self, _context: &RoundContext, values: &mut [f32], message: &mut [u8]) {
        let (means, signs) = message.split_at_mut(values.len().div_ceil(self.block_len) * MEANS_BYTES);
        let blocks = values.chunks_mut(self.block_len).zip(signs.chunks_mut(self.block_len / 8));
        for ((values, signs), bytes) in blocks.zip(means.as_chunks_mut::<MEANS_BYTES>().0) {
            let means = Means::of(values);
            *bytes = means.to_bytes();
            let (whole, rest) = values.as_chunks_mut::<8>();
            for (values, byte) in whole.iter_mut().zip(signs.iter_mut()) {
                *byte = encode_signs(means, values);
            }
            if !rest.is_empty() {
                signs[whole.len()] = encode_signs(means, rest);
            }
        }
    }

    fn decode(&mut self, _context: &RoundContext, result: &[u8], gradient: &mut [f32]) -> Result<()> {
        let num_bytes = message_bytes(gradient.len(), self.block_len);
        let means_bytes = gradient.len().div_ceil(self.block_len) * MEANS_BYTES;
        for (block, sums) in gradient.chunks_mut(self.block_len).enumerate() {
            sums.fill(0.0);
            for message in result.chunks_exact(num_bytes) {
                let (means, signs) = message.split_at(means_bytes);
                let means = Means::from_bytes(means.as_chunks::<MEANS_BYTES>().0[block]);
                add(means, &signs[block * self.block_len / 8..], sums);
            }
        }
        Ok(())
    }
}

/// Returns the signs of at most eight values, and replaces the values by their compression errors.
#[inline(always)]
fn encode_signs(means: Means, values: &mut [f32]) -> u8 {
    let mut signs = 0;
    for (bit, value) in values.iter_mut().enumerate() {
        let is_minus = value.is_sign_negative();
        signs |= u8::from(is_minus) << bit;
        *value -= if is_minus { means.minus } else { means.plus };
    }
    signs
}

fn add(means: Means, signs: &[u8], sums: &mut [f32]) {
    let value = |byte: u8, bit: usize| if byte >> bit & 1 == 1 { means.minus } else { means.plus };
    let (bytes, rest) = sums.as_chunks_mut::<8>();
    for (sums, &byte) in bytes.iter_mut().zip(signs) {
        for (bit, sum) in sums.iter_mut().enumerate() {
            *sum += value(byte, bit);
        }
    }
    for (bit, sum) in rest.iter_mut().enumerate() {
        *sum += value(signs[bytes.len()], bit);
    }
}

impl Means {
    fn of(values: &[f32]) -> Self {
        let (mut plus, mut minus, mut num_minus) = ([0.0; LANES], [0.0; LANES], [0_u32; LANES]);
        let mut add = |chunk: &[f32]| {
            for (lane, &value) in chunk.iter().enumerate() {
                let is_minus = value.is_sign_negative();
                plus[lane] += if is_minus { 0.0 } else { value };
                minus[lane] += if is_minus { value } else { 0.0 };
                num_minus[lane] += u32::from(is_minus);
            }
        };
        let (chunks, rest) = values.as_chunks::<LANES>();
        chunks.iter().for_each(|chunk| add(chunk));
        add(rest);
        let num_minus = num_minus.iter().map(|&count| count as usize).sum();
        Means::of_sums(plus.iter().sum(), minus.iter().sum(), values.len(), num_minus)
    }

    /// Returns the means of `len` values, of which `num_minus` have a minus sign.
    fn of_sums(plus: f32, minus: f32, len: usize, num_minus: usize) -> Self {
        let mean = |sum: f32, count: usize| sum / count.max(1) as f32;
        Means { plus: mean(plus, len - num_minus), minus: mean(minus, num_minus) }
    }

    fn to_bytes(self) -> [u8; MEANS_BYTES] {
        bytemuck::cast([self.plus.to_le_bytes(), self.minus.to_le_bytes()])
    }

    fn from_bytes(bytes: [u8; MEANS_BYTES]) -> Self {
        let [plus, minus]: [[u8; 4]; 2] = bytemuck::cast(bytes);
        Means { plus: f32::from_le_bytes(plus), minus: f32::from_le_bytes(minus) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn means_of_more_values_than_32_bits_count() {
        let means = Means::of_sums(6.0, -3.0, (1 << 33) + 1, 1);
        assert_eq!((means.plus, means.minus), (6.0 / (1_u64 << 33) as f32, -3.0));
        let means = Means::of_sums(6.0, -3.0, (1 << 33) + 1, 1 << 33);
        assert_eq!((means.plus, means.minus), (6.0, -3.0 / (1_u64 << 33) as f32));
    }
}
