//! Sums of squares that are exact, and so the same however their terms are divided.

use super::simd::{LANES, for_each_simd_level};
use super::{Cpu, SharedSlice};

/// A sum of f32 values that no rounding has touched: its value depends neither on the order of the terms nor on how they lie among threads and ranks.
///
/// It has one f64 for each window of 36 bits between the smallest and the largest f32, which holds a multiple of the window's lowest bit. Windows are added one by one, in any
/// order: up to `2^17` sums after each was [carried](ExactSum::carry). It is exact below `2^156`. (The windows are those of Demmel and Nguyen, "Fast reproducible
/// floating-point summation", 2013, at fixed places and all kept.)
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ExactSum {
    windows: [f64; ExactSum::LEN],
}

impl ExactSum {
    /// Number of windows.
    pub const LEN: usize = 8;

    const WINDOW_BITS: usize = 36;

    /// The lowest bit of a window. That of the first is the smallest f32.
    const fn lowest(window: usize) -> f64 {
        power_of_two((Self::WINDOW_BITS * window) as i32 - 149)
    }

    /// The window of the highest bit of a finite value above 0, by its bits.
    const fn highest_window(bits: u32) -> usize {
        let exponent = (bits >> (f32::MANTISSA_DIGITS - 1)) as usize;
        let exponent = if exponent > 0 { exponent } else { 1 };
        // The value is below 2^(exponent - 126), which is so many bits above the smallest f32.
        let num_bits = exponent + 23;
        (num_bits - 1) / Self::WINDOW_BITS
    }

    /// Adds windows.
    ///
    /// # Panics
    /// If there are not [`LEN`](Self::LEN).
    pub fn add(&mut self, windows: &[f64]) {
        assert_eq!(windows.len(), Self::LEN, "windows of a sum");
        self.windows.iter_mut().zip(windows).for_each(|(sum, window)| *sum += window);
    }

    /// Its windows, for [`add`](Self::add).
    pub fn windows(&self) -> &[f64; ExactSum::LEN] {
        &self.windows
    }

    /// Carries what windows have beyond their bits to the next ones.
    pub fn carry(&mut self) {
        for window in 1..Self::LEN {
            let lowest = Self::lowest(window);
            let carried = (self.windows[window - 1] / lowest).floor() * lowest;
            self.windows[window - 1] -= carried;
            self.windows[window] += carried;
        }
    }

    /// The sum, rounded once for each window that it has bits in.
    pub fn value(mut self) -> f64 {
        self.carry();
        self.windows.iter().sum()
    }
}

/// `2^exponent`, of a normal value.
const fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((exponent + f64::MAX_EXP - 1) as u64) << (f64::MANTISSA_DIGITS - 1))
}

/// Squares that are divided into windows at a time: they stay in the first cache.
const CHUNK: usize = 256;

/// Squares between two carries: so many fill the room above a window's bits.
const CARRY_BLOCK: usize = 1 << 16;

/// Parts that threads sum, each for itself.
const PARTS_MAX: usize = 64;

for_each_simd_level! {
    fn add_squares(x: &[f32], sum: &mut ExactSum) {
        for x in x.chunks(CHUNK) {
            let mut rest = [0.0_f64; CHUNK];
            let mut largest = 0_u32;
            for (rest, x) in rest.iter_mut().zip(x) {
                let square = x * x;
                // Without the sign, which only NaN has. Bits of values that are not negative are ordered like the values.
                largest = largest.max(square.abs().to_bits());
                *rest = f64::from(square);
            }
            if largest >= f32::INFINITY.to_bits() {
                sum.windows[ExactSum::LEN - 1] += f64::from(f32::from_bits(largest));
                continue;
            }
            for window in (0..=ExactSum::highest_window(largest)).rev() {
                // Adding it rounds to a multiple of the window's lowest bit, and leaves that in the low bits.
                let rounder = 1.5 * power_of_two(f64::MANTISSA_DIGITS as i32 - 1) * ExactSum::lowest(window);
                let mut sums = [0.0_f64; LANES];
                let mut left = [0_u64; LANES];
                for rest in rest.chunks_exact_mut(LANES) {
                    for ((rest, sum), left) in rest.iter_mut().zip(&mut sums).zip(&mut left) {
                        let part = (*rest + rounder) - rounder;
                        *sum += part;
                        *rest -= part;
                        *left |= rest.to_bits();
                    }
                }
                sum.windows[window] += sums.iter().sum::<f64>();
                if left.iter().all(|&left| left == 0) {
                    break;
                }
            }
        }
    }
}

impl Cpu {
    /// Sum of the squares of `x`, each rounded to f32. It is infinite or NaN if a square is.
    pub(crate) fn sum_of_squares(&self, x: &[f32]) -> ExactSum {
        // On the stack, so that nothing is allocated.
        let mut parts = [ExactSum::default(); PARTS_MAX];
        let num_blocks = x.len().div_ceil(CARRY_BLOCK);
        let part_len = num_blocks.div_ceil(PARTS_MAX) * CARRY_BLOCK;
        let shared = SharedSlice::new(&mut parts);
        self.threads.run(x.len().div_ceil(part_len.max(1)), &|part| {
            // SAFETY: parts do not overlap.
            let sum = &mut unsafe { shared.range(part, 1) }[0];
            let end = x.len().min((part + 1) * part_len);
            for block in x[part * part_len..end].chunks(CARRY_BLOCK) {
                add_squares(self.features, block, sum);
                sum.carry();
            }
        });
        let mut sum = ExactSum::default();
        parts.iter().for_each(|part| sum.add(&part.windows));
        sum.carry();
        sum
    }
}

#[cfg(test)]
mod tests;
