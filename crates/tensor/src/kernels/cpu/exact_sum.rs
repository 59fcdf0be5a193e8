//! Exact sums of squares, which do not depend on how their terms are divided among threads and ranks.

use super::simd::{LANES, for_each_simd_level};
use super::{Cpu, SharedSlice};

/// An exact sum of f32 values. Its value depends neither on the order of the terms nor on their division among threads and ranks.
///
/// It consists of one f64 per window of 36 bits between the smallest and the largest f32. Each f64 is a multiple of the lowest bit of its
/// window. Sums are added window by window, in any order; up to `2^17` sums can be added if each has been [carried](ExactSum::carry). The
/// windows represent the sum exactly if it is below `2^156`. (Demmel and Nguyen, "Fast reproducible floating-point summation", 2013, use
/// such windows; here, their positions are fixed and none is dropped.)
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ExactSum {
    windows: [f64; ExactSum::LEN],
}

impl ExactSum {
    /// Number of windows.
    pub const LEN: usize = 8;

    const WINDOW_BITS: usize = 36;

    /// Returns the lowest bit of a window. The lowest bit of the first window is the smallest f32.
    const fn lowest(window: usize) -> f64 {
        power_of_two((Self::WINDOW_BITS * window) as i32 - 149)
    }

    /// Returns the window of the highest bit of a finite positive value, given by its bits.
    const fn highest_window(bits: u32) -> usize {
        let exponent = (bits >> (f32::MANTISSA_DIGITS - 1)) as usize;
        let exponent = if exponent > 0 { exponent } else { 1 };
        // The value is below 2^(exponent - 126), which is `num_bits` bits above the smallest f32.
        let num_bits = exponent + 23;
        (num_bits - 1) / Self::WINDOW_BITS
    }

    /// Adds another sum, given by its windows.
    ///
    /// # Panics
    /// If the number of windows is not [`LEN`](Self::LEN).
    pub fn add(&mut self, windows: &[f64]) {
        assert_eq!(windows.len(), Self::LEN, "windows of a sum");
        self.windows.iter_mut().zip(windows).for_each(|(sum, window)| *sum += window);
    }

    /// Returns the windows, for [`add`](Self::add).
    pub fn windows(&self) -> &[f64; ExactSum::LEN] {
        &self.windows
    }

    /// Carries the bits that exceed a window to the next windows.
    pub fn carry(&mut self) {
        for window in 1..Self::LEN {
            let lowest = Self::lowest(window);
            let carried = (self.windows[window - 1] / lowest).floor() * lowest;
            self.windows[window - 1] -= carried;
            self.windows[window] += carried;
        }
    }

    /// Returns the sum of the windows, rounded after each addition of a window.
    pub fn value(mut self) -> f64 {
        self.carry();
        self.windows.iter().sum()
    }
}

/// Returns `2^exponent`. The result must be normal.
const fn power_of_two(exponent: i32) -> f64 {
    f64::from_bits(((exponent + f64::MAX_EXP - 1) as u64) << (f64::MANTISSA_DIGITS - 1))
}

/// Number of squares that are split into windows at a time. They fit into the L1 cache.
const CHUNK: usize = 256;

/// Number of squares between two carries: as many as fit into the spare bits above a window.
const CARRY_BLOCK: usize = 1 << 16;

/// Maximum number of parts that threads sum independently.
const PARTS_MAX: usize = 64;

for_each_simd_level! {
    fn add_squares(x: &[f32], sum: &mut ExactSum) {
        for x in x.chunks(CHUNK) {
            let mut rest = [0.0_f64; CHUNK];
            let mut largest = 0_u32;
            for (rest, x) in rest.iter_mut().zip(x) {
                let square = x * x;
                // Drops the sign, which only NaN has. Bits of non-negative values are ordered like the values.
                largest = largest.max(square.abs().to_bits());
                *rest = f64::from(square);
            }
            if largest >= f32::INFINITY.to_bits() {
                sum.windows[ExactSum::LEN - 1] += f64::from(f32::from_bits(largest));
                continue;
            }
            for window in (0..=ExactSum::highest_window(largest)).rev() {
                // Adding `rounder` rounds to a multiple of the window's lowest bit.
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
    /// Sums the squares of `x`, each rounded to f32. The sum is infinite or NaN if a square is.
    pub(crate) fn sum_of_squares(&self, x: &[f32]) -> ExactSum {
        // On the stack, to avoid an allocation.
        let mut parts = [ExactSum::default(); PARTS_MAX];
        let num_blocks = x.len().div_ceil(CARRY_BLOCK);
        let part_len = num_blocks.div_ceil(PARTS_MAX) * CARRY_BLOCK;
        let shared = SharedSlice::new(&mut parts);
        self.threads.run(x.len().div_ceil(part_len.max(1)), &|part| {
            // SAFETY: parts do not overlap.
            let sum = &mut unsafe { shared.range(part, 1) }[0];
            let end = x.len().min((part + 1) * part_len);
            for block in x[part * part_len..end].chunks(CARRY_BLOCK) {
                add_squares(self.simd_level, block, sum);
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
