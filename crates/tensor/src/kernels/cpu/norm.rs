//! Layer normalization (Ba, Kiros, Hinton 2016) and RMS normalization (Zhang, Sennrich 2019).
//!
//! Both compute `y = (x - mean) * scale * weight + bias` per row. RMS normalization has mean 0 and no bias.

use super::element::Element;
use super::reduce::{COLUMN_BLOCK, sum_rows, write_or_add};
use super::simd::{for_each_simd_level, sum_map, sum_zip};
use super::{Cpu, SharedSlice};

/// Number of values per row that are saved for backward: the mean and the scale, which is one over the standard deviation or the root mean
/// square.
pub(crate) const NUM_STATISTICS: usize = 2;

for_each_simd_level! {
    fn forward_row<T: Element>(x: &[f32], weight: &[f32], bias: Option<&[f32]>, epsilon: f32, is_centered: bool, y: &mut [T]) -> [f32; 2] {
        let count = x.len() as f32;
        let mean = if is_centered { sum_map(x, |x| x) / count } else { 0.0 };
        let variance = sum_map(x, |x| (x - mean) * (x - mean)) / count;
        let scale = 1.0 / (variance + epsilon).sqrt();
        match bias {
            Some(bias) => {
                for (((y, &x), &weight), &bias) in y.iter_mut().zip(x).zip(weight).zip(bias) {
                    *y = T::from_f32((x - mean) * scale * weight + bias);
                }
            }
            None => {
                for ((y, &x), &weight) in y.iter_mut().zip(x).zip(weight) {
                    *y = T::from_f32((x - mean) * scale * weight);
                }
            }
        }
        [mean, scale]
    }

    fn backward_row<T: Element>(x: &[f32], weight: &[f32], dy: &[T], statistics: [f32; 2], is_centered: bool, dx: &mut [f32], accumulate: bool) {
        let [mean, scale] = statistics;
        let count = x.len() as f32;
        let projection = sum_zip(x, dy, weight, |x, dy, weight| dy.to_f32() * weight * (x - mean)) * scale / count;
        let mean_grad = if is_centered { sum_zip(dy, weight, weight, |dy, weight, _| dy.to_f32() * weight) / count } else { 0.0 };
        if accumulate {
            for (((dx, &x), dy), &weight) in dx.iter_mut().zip(x).zip(dy).zip(weight) {
                *dx += scale * (dy.to_f32() * weight - mean_grad - (x - mean) * scale * projection);
            }
        } else {
            for (((dx, &x), dy), &weight) in dx.iter_mut().zip(x).zip(dy).zip(weight) {
                *dx = scale * (dy.to_f32() * weight - mean_grad - (x - mean) * scale * projection);
            }
        }
    }

    fn weight_block<T: Element>(x: &[f32], dy: &[T], statistics: &[f32], cols: usize, first: usize, out: &mut [f32], accumulate: bool) {
        let width = out.len();
        let total = sum_rows(x.len() / cols, width, |row, partial| {
            let [mean, scale] = [statistics[row * NUM_STATISTICS], statistics[row * NUM_STATISTICS + 1]];
            let x = &x[row * cols + first..row * cols + first + width];
            let dy = &dy[row * cols + first..row * cols + first + width];
            for ((partial, &x), dy) in partial.iter_mut().zip(x).zip(dy) {
                *partial += dy.to_f32() * (x - mean) * scale;
            }
        });
        write_or_add(out, &total[..width], accumulate);
    }
}

/// The kind of normalization.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NormKind {
    /// Added to the variance or to the mean square.
    pub(crate) epsilon: f32,
    /// Whether the mean is subtracted: layer normalization; otherwise RMS normalization.
    pub(crate) is_centered: bool,
}

/// The inputs of a normalization, and the statistics that forward saved.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NormedRows<V> {
    pub(crate) x: V,
    pub(crate) weight: V,
    /// [`NUM_STATISTICS`] values per row.
    pub(crate) statistics: V,
}

impl<V> NormedRows<V> {
    /// Applies a function to each array.
    pub(crate) fn map<U>(self, mut array: impl FnMut(V) -> U) -> NormedRows<U> {
        NormedRows { x: array(self.x), weight: array(self.weight), statistics: array(self.statistics) }
    }
}

impl Cpu {
    pub(crate) fn norm<T: Element>(
        &self,
        x: &[f32],
        weight: &[f32],
        bias: Option<&[f32]>,
        kind: NormKind,
        y: &mut [T],
        statistics: &mut [f32],
    ) {
        let NormKind { epsilon, is_centered } = kind;
        let cols = weight.len();
        let rows = x.len() / cols;
        assert!(x.len() == y.len() && x.len() == rows * cols && statistics.len() == rows * NUM_STATISTICS);
        let (y, statistics) = (SharedSlice::new(y), SharedSlice::new(statistics));
        self.for_row_blocks(rows, cols, |first, num_rows| {
            for row in first..first + num_rows {
                // SAFETY: rows do not overlap.
                let (y, saved) = unsafe {
                    (y.range(row * cols, cols), statistics.range(row * NUM_STATISTICS, NUM_STATISTICS))
                };
                let x = &x[row * cols..(row + 1) * cols];
                saved.copy_from_slice(&forward_row(
                    self.simd_level,
                    x,
                    weight,
                    bias,
                    epsilon,
                    is_centered,
                    y,
                ));
            }
        });
    }

    pub(crate) fn norm_backward_input<T: Element>(
        &self,
        rows: NormedRows<&[f32]>,
        kind: NormKind,
        dy: &[T],
        dx: &mut [f32],
        accumulate: bool,
    ) {
        let NormedRows { x, weight, statistics } = rows;
        let cols = weight.len();
        let rows = x.len() / cols;
        assert!(x.len() == dx.len() && x.len() == dy.len() && x.len() == rows * cols);
        self.for_each_row(dx, cols, |row, dx| {
            let range = row * cols..(row + 1) * cols;
            let (x, dy) = (&x[range.clone()], &dy[range]);
            let saved = [statistics[row * NUM_STATISTICS], statistics[row * NUM_STATISTICS + 1]];
            backward_row(self.simd_level, x, weight, dy, saved, kind.is_centered, dx, accumulate);
        });
    }

    pub(crate) fn norm_backward_weight<T: Element>(
        &self,
        x: &[f32],
        dy: &[T],
        statistics: &[f32],
        d_weight: &mut [f32],
        accumulate: bool,
    ) {
        let cols = d_weight.len();
        assert!(x.len() == dy.len() && x.len().is_multiple_of(cols));
        self.for_each_chunk(d_weight, COLUMN_BLOCK, |first, out| {
            weight_block(self.simd_level, x, dy, statistics, cols, first, out, accumulate);
        });
    }
}

#[cfg(test)]
mod tests;
