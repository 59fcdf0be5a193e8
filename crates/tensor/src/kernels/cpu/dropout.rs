//! Random zeros.

use super::element::Element;
use super::simd::for_each_simd_level;
use super::{Cpu, SharedSlice};
use trireme_base::RandomKey;

/// Random words at a time.
const WORDS: usize = 256;

for_each_simd_level! {
    fn drop_block<T: Element>(x: &mut [T], key: RandomKey, first: u64, threshold: u32, scale: f32) {
        let mut words = [0; WORDS];
        let mut first = first;
        for x in x.chunks_mut(WORDS) {
            let words = &mut words[..x.len()];
            key.fill_words_from(first, words);
            for (x, &word) in x.iter_mut().zip(words.iter()) {
                *x = if word < threshold { T::from_f32(0.0) } else { T::from_f32(x.to_f32() * scale) };
            }
            first = first.wrapping_add(WORDS as u64);
        }
    }
}

impl Cpu {
    /// Sets element `i` to 0 where word `first + i` of the stream lies below `rate` of its range, else divides it by `1 - rate`.
    pub(crate) fn dropout<T: Element>(&self, x: &mut [T], key: RandomKey, first: u64, rate: f32) {
        let threshold = (f64::from(rate) * 2.0_f64.powi(32)) as u32;
        let (len, scale) = (x.len(), 1.0 / (1.0 - rate));
        let x = SharedSlice::new(x);
        self.for_row_blocks(len, 1, |start, len| {
            // SAFETY: blocks do not overlap.
            let x = unsafe { x.range(start, len) };
            drop_block(self.features, x, key, first.wrapping_add(start as u64), threshold, scale);
        });
    }
}
