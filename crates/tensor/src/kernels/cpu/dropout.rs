//! Dropout.

use super::element::Element;
use super::simd::for_each_simd_level;
use super::{Cpu, SharedSlice};
use trireme_base::RandomKey;

/// Number of random words per block.
const WORDS_PER_BLOCK: usize = 256;

for_each_simd_level! {
    fn drop_block<T: Element>(x: &mut [T], key: RandomKey, first: u64, threshold: u32, scale: f32) {
        let mut words = [0; WORDS_PER_BLOCK];
        let mut first = first;
        for x in x.chunks_mut(WORDS_PER_BLOCK) {
            let words = &mut words[..x.len()];
            key.fill_words_from(first, words);
            for (x, &word) in x.iter_mut().zip(words.iter()) {
                *x = if word < threshold { T::from_f32(0.0) } else { T::from_f32(x.to_f32() * scale) };
            }
            first = first.wrapping_add(WORDS_PER_BLOCK as u64);
        }
    }
}

/// The positions in a random stream of the words that decide which elements are dropped. Element `col` of row `row` uses word
/// `first + row * stride + col`. A row has `len` elements.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RandomWordRows {
    pub(crate) first: u64,
    pub(crate) len: usize,
    pub(crate) stride: usize,
}

/// Returns the random word below which an element is dropped, and the factor of the others.
pub(crate) fn threshold_and_scale(rate: f32) -> (u32, f32) {
    ((f64::from(rate) * 2.0_f64.powi(32)) as u32, 1.0 / (1.0 - rate))
}

impl Cpu {
    pub(crate) fn dropout<T: Element>(&self, x: &mut [T], key: RandomKey, words: RandomWordRows, rate: f32) {
        let (threshold, scale) = threshold_and_scale(rate);
        // Rows without gaps between their words are treated as a single sequence of words.
        let (row_len, stride) = if words.len == words.stride { (1, 1) } else { (words.len, words.stride) };
        let num_rows = x.len() / row_len.max(1);
        let x = SharedSlice::new(x);
        self.for_row_blocks(num_rows, row_len, |start, num| {
            let drop = |row: usize, num: usize| {
                // SAFETY: rows do not overlap.
                let x = unsafe { x.range(row * row_len, num * row_len) };
                let first = words.first.wrapping_add((row * stride) as u64);
                drop_block(self.simd_level, x, key, first, threshold, scale);
            };
            if row_len == stride {
                drop(start, num)
            } else {
                (start..start + num).for_each(|row| drop(row, 1))
            }
        });
    }
}
