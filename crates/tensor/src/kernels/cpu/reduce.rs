//! Column sums, and conversions.

use super::Cpu;
use super::element::Element;
use super::simd::for_each_simd_level;

/// Number of columns per task: a few registers, full cache lines.
pub(crate) const COLUMN_BLOCK: usize = 64;

/// Number of rows per partial sum. Blocks keep the rounding error of a long column near that of a short one.
const ROW_BLOCK: usize = 128;

/// Writes or adds `total`.
#[inline(always)]
pub(crate) fn write_or_add(out: &mut [f32], total: &[f32], accumulate: bool) {
    if accumulate {
        out.iter_mut().zip(total).for_each(|(out, &total)| *out += total);
    } else {
        out.copy_from_slice(total);
    }
}

/// Sums rows of `width` elements in blocks of `ROW_BLOCK` rows. `add(row, partial)` adds a row to the partial sum of its block.
#[inline(always)]
pub(crate) fn sum_rows(
    rows: usize,
    width: usize,
    mut add: impl FnMut(usize, &mut [f32; COLUMN_BLOCK]),
) -> [f32; COLUMN_BLOCK] {
    let mut total = [0.0; COLUMN_BLOCK];
    for block in 0..rows.div_ceil(ROW_BLOCK) {
        let mut partial = [0.0; COLUMN_BLOCK];
        for row in block * ROW_BLOCK..rows.min((block + 1) * ROW_BLOCK) {
            add(row, &mut partial);
        }
        total[..width].iter_mut().zip(&partial).for_each(|(total, partial)| *total += partial);
    }
    total
}

for_each_simd_level! {
    fn column_block<T: Element>(x: &[T], cols: usize, first: usize, out: &mut [f32], accumulate: bool) {
        let width = out.len();
        let total = sum_rows(x.len() / cols, width, |row, partial| {
            let row = &x[row * cols + first..row * cols + first + width];
            partial.iter_mut().zip(row).for_each(|(partial, x)| *partial += x.to_f32());
        });
        write_or_add(out, &total[..width], accumulate);
    }

    fn convert<T: Element, U: Element>(x: &[T], y: &mut [U]) {
        y.iter_mut().zip(x).for_each(|(y, x)| *y = U::from_f32(x.to_f32()));
    }

    fn round<T: Element, P: Element>(x: &[T], y: &mut [f32]) {
        y.iter_mut().zip(x).for_each(|(y, x)| *y = P::from_f32(x.to_f32()).to_f32());
    }

    fn scale(x: &mut [f32], factor: f32) {
        x.iter_mut().for_each(|x| *x *= factor);
    }

    fn axpby(out: &mut [f32], factor: f32, term: &[f32], term_factor: f32) {
        out.iter_mut().zip(term).for_each(|(out, &term)| *out = factor * *out + term_factor * term);
    }
}

impl Cpu {
    pub(crate) fn column_sums<T: Element>(&self, x: &[T], out: &mut [f32], accumulate: bool) {
        let cols = out.len();
        assert!(cols > 0 && x.len().is_multiple_of(cols));
        self.for_each_chunk(out, COLUMN_BLOCK, |first, out| {
            column_block(self.simd_level, x, cols, first, out, accumulate);
        });
    }

    pub(crate) fn convert<T: Element, U: Element>(&self, x: &[T], y: &mut [U]) {
        assert_eq!(x.len(), y.len());
        self.for_each_block(y, |first, y| convert(self.simd_level, &x[first..first + y.len()], y));
    }

    pub(crate) fn round<T: Element, P: Element>(&self, x: &[T], y: &mut [f32]) {
        assert_eq!(x.len(), y.len());
        self.for_each_block(y, |first, y| round::<T, P>(self.simd_level, &x[first..first + y.len()], y));
    }

    /// `x *= factor`, elementwise.
    pub(crate) fn scale(&self, x: &mut [f32], factor: f32) {
        self.for_each_block(x, |_, x| scale(self.simd_level, x, factor));
    }

    /// `out = factor * out + term_factor * term`, elementwise.
    pub(crate) fn axpby(&self, out: &mut [f32], factor: f32, term: &[f32], term_factor: f32) {
        assert_eq!(out.len(), term.len());
        self.for_each_block(out, |first, out| {
            let term = &term[first..first + out.len()];
            axpby(self.simd_level, out, factor, term, term_factor);
        });
    }
}

#[cfg(test)]
mod tests;
