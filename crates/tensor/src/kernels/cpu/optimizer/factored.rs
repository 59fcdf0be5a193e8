//! Adafactor for matrices: the second moment is the product of a column vector and a row vector (Shazeer, Stern, "Adafactor", 2018, section
//! 3 and algorithm 4).

use super::pieces::{Piece, Pieces};
use super::rules::{ADAFACTOR_MOMENT_MIN, adafactor_update, bounded_square};
use crate::kernels::cpu::simd::{for_each_simd_level, sum_map, sum_zip};
use crate::kernels::cpu::{Cpu, SharedSlice};
use crate::parameter_table::leaf_sum;
use std::ops::Range;

/// Number of columns per task of a column sum.
const COLUMNS_PER_TASK: usize = 64;

/// A matrix with a factored second moment, or the shard of it that this rank stores.
#[derive(Debug, Clone)]
pub struct FactoredMatrix {
    pub(crate) cols: usize,
    /// First element of the matrix within its unit's flat buffer.
    pub(crate) offset: usize,
    /// The stored elements of the matrix, within the unit's flat buffer.
    pub(crate) stored: Range<usize>,
    /// Start of the parameter and gradient buffers within the unit's flat buffer.
    pub(crate) buffer_start: usize,
    /// Length of a leaf of the unit.
    pub(crate) leaf_len: usize,
}

/// Hyperparameters of one Adafactor update of a matrix, and the matrix's offset.
#[derive(Debug, Clone, Copy)]
pub struct FactoredStep {
    /// First element of the matrix within its unit's flat buffer.
    pub offset: usize,
    /// Factor of the parameter (weight decay).
    pub parameter_factor: f32,
    /// Factor applied to every gradient first.
    pub grad_scale: f32,
}

/// The factored second moment of a matrix. The moment of an element is its row moment, divided by the mean of all row moments, times its
/// column moment.
#[derive(Debug, Clone, Copy)]
pub struct FactoredMoments<V> {
    /// Row moments, f32 `[rows]`.
    pub rows: V,
    /// Column moments, f32 `[cols]`.
    pub cols: V,
    /// Mean of the row moments, one f64.
    pub row_mean: V,
}

impl<V> FactoredMoments<V> {
    /// Applies a function to each array.
    pub(crate) fn map<U>(self, mut array: impl FnMut(V) -> U) -> FactoredMoments<U> {
        FactoredMoments { rows: array(self.rows), cols: array(self.cols), row_mean: array(self.row_mean) }
    }
}

/// The elements of [`FactoredMoments`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct MomentFactors<'a> {
    pub(crate) rows: &'a [f32],
    pub(crate) cols: &'a [f32],
    /// Mean over all rows of the full matrix; one value.
    pub(crate) row_mean: &'a [f64],
}

impl MomentFactors<'_> {
    fn row(&self, row: usize) -> f32 {
        (f64::from(self.rows[row]) / self.row_mean[0]) as f32
    }
}

for_each_simd_level! {
    fn square_sum(g: &[f32], scale: f32) -> f32 {
        sum_map(g, |g| bounded_square(g * scale))
    }

    fn add_squares(g: &[f32], scale: f32, sums: &mut [f32]) {
        sums.iter_mut().zip(g).for_each(|(sum, g)| *sum += bounded_square(g * scale));
    }

    fn update_squares(g: &[f32], cols: &[f32], row: f32, scale: f32) -> f32 {
        sum_zip(g, cols, g, |g, col, _| {
            let update = adafactor_update(g * scale, row * col);
            update * update
        })
    }

    fn update_row(p: &mut [f32], g: &[f32], cols: &[f32], row: f32, s: (FactoredStep, f32)) {
        let (s, lr) = s;
        for ((p, &g), &col) in p.iter_mut().zip(g).zip(cols) {
            *p = *p * s.parameter_factor - lr * adafactor_update(g * s.grad_scale, row * col);
        }
    }
}

impl FactoredMatrix {
    fn leaf_of(&self, position: usize) -> usize {
        position / self.leaf_len
    }

    /// Returns the leaves of the stored elements in `range` of the unit.
    fn leaves(&self, range: Range<usize>) -> Range<usize> {
        let (start, end) = (range.start.max(self.stored.start), range.end.min(self.stored.end));
        if start < end { self.leaf_of(start)..self.leaf_of(end - 1) + 1 } else { 0..0 }
    }

    /// Returns the stored elements of `range` in one leaf, as indices of the buffer.
    fn stored_in_leaf(&self, range: &Range<usize>, leaf: usize) -> Range<usize> {
        let start = range.start.max(self.stored.start).max(leaf * self.leaf_len);
        let end = range.end.min(self.stored.end).min((leaf + 1) * self.leaf_len);
        start - self.buffer_start..end.max(start) - self.buffer_start
    }
}

/// Splits a piece at row boundaries. Returns the row, the first column, and the elements within the piece of each segment.
fn segments(piece: &Piece, offset: usize, cols: usize) -> impl Iterator<Item = (usize, usize, Range<usize>)> {
    let (first, len) = (piece.position - offset, piece.len);
    let mut done = 0;
    std::iter::from_fn(move || {
        let (row, col) = ((first + done) / cols, (first + done) % cols);
        let segment = done..len.min(done + cols - col);
        done = segment.end;
        (!segment.is_empty()).then_some((row, col, segment))
    })
}

impl Cpu {
    /// Sums the squares of the stored gradients over each row of a matrix.
    pub(crate) fn row_squares(&self, matrix: &FactoredMatrix, grads: &[f32], scale: f32, sums: &mut [f64]) {
        let cols = matrix.cols;
        self.for_each_reduced_row(sums, 1, cols, |row, sum| {
            let range = matrix.offset + row * cols..matrix.offset + (row + 1) * cols;
            let mut leaf = |leaf| {
                f64::from(square_sum(self.simd_level, &grads[matrix.stored_in_leaf(&range, leaf)], scale))
            };
            sum[0] = leaf_sum(matrix.leaves(range.clone()), 0.0, &mut leaf, &|a, b| a + b);
        });
    }

    /// Sums the squares of the stored gradients over each column of a matrix.
    pub(crate) fn column_squares(
        &self,
        matrix: &FactoredMatrix,
        grads: &[f32],
        scale: f32,
        sums: &mut [f64],
    ) {
        let (cols, held) = (matrix.cols, &matrix.stored);
        // Conversions between indices of the buffer and of the matrix.
        let (to_matrix, to_buffer) = (
            |index| index + matrix.buffer_start - matrix.offset,
            |index| index + matrix.offset - matrix.buffer_start,
        );
        self.for_each_chunk(&mut sums[..cols], COLUMNS_PER_TASK, |first, columns| {
            let width = columns.len();
            let mut leaf = |leaf: usize| {
                let here = matrix.stored_in_leaf(held, leaf);
                let (start, end) = (to_matrix(here.start), to_matrix(here.end));
                let mut sums = [0.0_f32; COLUMNS_PER_TASK];
                for row in start / cols..end.div_ceil(cols) {
                    let from = (row * cols + first).clamp(start, end);
                    let to = (row * cols + first + width).clamp(start, end);
                    if from < to {
                        let shift = from - row * cols - first;
                        let g = &grads[to_buffer(from)..to_buffer(to)];
                        add_squares(self.simd_level, g, scale, &mut sums[shift..shift + g.len()]);
                    }
                }
                sums.map(f64::from)
            };
            let add = |mut left: [f64; COLUMNS_PER_TASK], right: [f64; COLUMNS_PER_TASK]| {
                left.iter_mut().zip(right).for_each(|(left, right)| *left += right);
                left
            };
            let total = leaf_sum(matrix.leaves(held.clone()), [0.0; COLUMNS_PER_TASK], &mut leaf, &add);
            columns.copy_from_slice(&total[..width]);
        });
    }

    pub(crate) fn factored_moments(&self, sums: &[f64], num_terms: usize, mixing: f32, moments: &mut [f32]) {
        assert_eq!(sums.len(), moments.len(), "a sum for each moment");
        let mixing = f64::from(mixing);
        for (moment, sum) in moments.iter_mut().zip(sums) {
            let square = sum / num_terms as f64 + f64::from(ADAFACTOR_MOMENT_MIN);
            *moment = ((1.0 - mixing) * f64::from(*moment) + mixing * square) as f32;
        }
    }

    pub(crate) fn factored_squares(
        &self,
        pieces: &Pieces,
        step: FactoredStep,
        factors: MomentFactors<'_>,
        grads: &[f32],
        sums: &mut [[f64; 2]],
    ) {
        assert_eq!(sums.len(), pieces.as_slice().len(), "sums for each piece");
        let sums = SharedSlice::new(sums);
        self.for_pieces(pieces, |index, piece| {
            let g = &grads[piece.start..piece.start + piece.len];
            let mut sum = 0.0;
            for (row, col, segment) in segments(piece, step.offset, factors.cols.len()) {
                let cols = &factors.cols[col..col + segment.len()];
                let (row, scale) = (factors.row(row), step.grad_scale);
                sum += f64::from(update_squares(self.simd_level, &g[segment], cols, row, scale));
            }
            // SAFETY: each piece has its own sums.
            let sums = unsafe { sums.range(index, 1) };
            sums[0] = [sum, 0.0];
        });
    }

    pub(crate) fn factored_update(
        &self,
        pieces: &Pieces,
        step: FactoredStep,
        lr: &[f32],
        factors: MomentFactors<'_>,
        parameters: &mut [f32],
        grads: &[f32],
    ) {
        let parameters = SharedSlice::new(parameters);
        self.for_pieces(pieces, |_, piece| {
            let g = &grads[piece.start..piece.start + piece.len];
            // SAFETY: pieces do not overlap.
            let p = unsafe { parameters.range(piece.start, piece.len) };
            let with_lr = (step, lr[0]);
            for (row, col, segment) in segments(piece, step.offset, factors.cols.len()) {
                let (row, cols) = (factors.row(row), &factors.cols[col..col + segment.len()]);
                update_row(self.simd_level, &mut p[segment.clone()], &g[segment], cols, row, with_lr);
            }
        });
    }
}
