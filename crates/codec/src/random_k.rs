//! The codec `random_k`: elements drawn at random in each step, the same ones on all ranks. No indices are sent, and
//! the all-reduce sums the values (Stich, Cordonnier, Jaggi: "Sparsified SGD with memory", 2018).
//!
//! A message consists of the values (f32) in ascending order of their indices. Without error feedback they are
//! multiplied by `len / k`, which makes the codec unbiased. If any element of a rank is not finite, drawn or not, the
//! rank sends NaN as its first value.

use super::error::Result;
use super::vector_ops::{INFINITY_BITS, largest_magnitude_bits};
use super::{Codec, RoundContext};
use trireme_base::{Random, RandomKey};

const WORD_BITS: usize = u64::BITS as usize;

/// Number of random words reserved for each step. A step draws at most 2^32 indices of two words each, and a few more
/// where a draw is rejected.
const WORDS_PER_STEP: u64 = 1 << 34;

/// Number of words that hold one bit for each of `len` elements.
const fn bitset_len(len: usize) -> usize {
    len.div_ceil(WORD_BITS)
}

/// Returns the scratch memory for `len` elements, in bytes.
pub(super) const fn scratch_bytes(len: usize) -> usize {
    bitset_len(len) * size_of::<u64>()
}

#[derive(Debug)]
pub(super) struct RandomK {
    /// A bit set with one bit for each element: whether it is drawn.
    drawn: Vec<u64>,
    is_unbiased: bool,
}

impl RandomK {
    pub(super) fn new(len: usize, is_unbiased: bool) -> Self {
        RandomK { drawn: vec![0; bitset_len(len)], is_unbiased }
    }

    /// Draws `num_drawn` of `len` elements. Each subset of that size has the same probability (Floyd's algorithm:
    /// Bentley, Floyd, "A sample of brilliance", 1987).
    fn draw(&mut self, key: RandomKey, step: u64, len: usize, num_drawn: usize) {
        self.drawn.fill(0);
        let mut random = Random::new(key, step.wrapping_mul(WORDS_PER_STEP));
        for last in len - num_drawn..len {
            let index = random.below(last as u64 + 1) as usize;
            let is_drawn = self.drawn[index / WORD_BITS] >> (index % WORD_BITS) & 1 == 1;
            let index = if is_drawn { last } else { index };
            self.drawn[index / WORD_BITS] |= 1 << (index % WORD_BITS);
        }
    }
}

/// Returns the indices of the bits that are set, in ascending order.
fn indices(drawn: &[u64]) -> impl Iterator<Item = usize> {
    drawn.iter().enumerate().flat_map(|(word, &bits)| {
        let words = std::iter::successors(Some(bits), |bits| Some(bits & bits.wrapping_sub(1)));
        words.take_while(|&bits| bits != 0).map(move |bits| word * WORD_BITS + bits.trailing_zeros() as usize)
    })
}

impl Codec for RandomK {
    fn encode(&mut self, context: &RoundContext, values: &mut [f32], message: &mut [u8]) {
        let message: &mut [f32] = bytemuck::cast_slice_mut(message);
        self.draw(context.key, context.step, values.len(), message.len());
        let is_finite = largest_magnitude_bits(values) < INFINITY_BITS;
        let factor = if self.is_unbiased { values.len() as f32 / message.len() as f32 } else { 1.0 };
        for (slot, index) in message.iter_mut().zip(indices(&self.drawn)) {
            *slot = factor * values[index];
            values[index] -= *slot;
        }
        if !is_finite {
            message[0] = f32::NAN;
        }
    }

    fn decode(&mut self, _context: &RoundContext, result: &[u8], gradient: &mut [f32]) -> Result<()> {
        gradient.fill(0.0);
        let sums: &[f32] = bytemuck::cast_slice(result);
        for (&sum, index) in sums.iter().zip(indices(&self.drawn)) {
            gradient[index] = sum;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(step: u64, len: usize, num_drawn: usize) -> Vec<usize> {
        let mut codec = RandomK::new(len, false);
        codec.draw(RandomKey::new(5, "draw"), step, len, num_drawn);
        indices(&codec.drawn).collect()
    }

    #[test]
    fn a_draw_has_the_requested_number_of_sorted_indices() {
        for (len, num_drawn) in [(1, 1), (64, 1), (65, 64), (130, 130), (1000, 37)] {
            let found = drawn(3, len, num_drawn);
            assert_eq!(found.len(), num_drawn);
            assert!(found.is_sorted_by(|a, b| a < b) && found.iter().all(|&index| index < len));
        }
        assert_ne!(drawn(3, 1000, 37), drawn(4, 1000, 37));
    }

    #[test]
    fn every_element_is_drawn_equally_often() {
        const STEPS: u64 = 4000;
        let mut counts = [0_u32; 100];
        for step in 0..STEPS {
            drawn(step, 100, 10).into_iter().for_each(|index| counts[index] += 1);
        }
        // 400 are expected, with a standard deviation of 19.
        assert!(counts.iter().all(|count| (310..490).contains(count)), "{counts:?}");
    }
}
