//! Functions of single elements, computed in f32.

use super::element::Element;
use super::simd::{for_each_simd_level, sum_zip};
use super::{Cpu, SharedSlice};

for_each_simd_level! {
    fn map_block<T: Element, F: Fn(f32) -> f32>(x: &[T], y: &mut [T], function: &F) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = T::from_f32(function(x.to_f32()));
        }
    }

    fn zip_block<T: Element, F: Fn(f32, f32) -> f32>(left: &[T], right: &[T], y: &mut [T], function: &F) {
        for ((y, left), right) in y.iter_mut().zip(left).zip(right) {
            *y = T::from_f32(function(left.to_f32(), right.to_f32()));
        }
    }

    fn map_block_in_place<T: Element, F: Fn(f32) -> f32>(y: &mut [T], function: &F) {
        y.iter_mut().for_each(|y| *y = T::from_f32(function(y.to_f32())));
    }

    fn update_block<T: Element, U: Element, F: Fn(f32, f32) -> f32>(y: &mut [T], x: &[U], function: &F) {
        for (y, x) in y.iter_mut().zip(x) {
            *y = T::from_f32(function(y.to_f32(), x.to_f32()));
        }
    }

    fn add_bias_row<T: Element, U: Element>(x: &[T], bias: Option<&[f32]>, residual: Option<&[f32]>, y: &mut [U]) {
        match (bias, residual) {
            (Some(bias), Some(residual)) => {
                for (((y, x), bias), residual) in y.iter_mut().zip(x).zip(bias).zip(residual) {
                    *y = U::from_f32(x.to_f32() + bias + residual);
                }
            }
            (Some(term), None) | (None, Some(term)) => {
                y.iter_mut().zip(x).zip(term).for_each(|((y, x), term)| *y = U::from_f32(x.to_f32() + term));
            }
            (None, None) => y.iter_mut().zip(x).for_each(|(y, x)| *y = U::from_f32(x.to_f32())),
        }
    }

    fn sum_row<T: Element, U: Element, F: Fn(f32, f32) -> f32>(left: &[T], right: &[U], function: &F) -> f32 {
        sum_zip(left, right, left, |left, right, _| function(left.to_f32(), right.to_f32()))
    }
}

impl Cpu {
    /// `y = function(x)`.
    pub(crate) fn map<T: Element>(&self, x: &[T], y: &mut [T], function: impl Fn(f32) -> f32 + Sync) {
        assert_eq!(x.len(), y.len());
        let out = SharedSlice::new(y);
        self.for_row_blocks(x.len(), 1, |first, len| {
            // SAFETY: blocks do not overlap.
            map_block(self.features, &x[first..first + len], unsafe { out.range(first, len) }, &function);
        });
    }

    /// `y = function(left, right)`.
    pub(crate) fn zip<T: Element>(
        &self,
        (left, right): (&[T], &[T]),
        y: &mut [T],
        function: impl Fn(f32, f32) -> f32 + Sync,
    ) {
        assert!(left.len() == y.len() && right.len() == y.len());
        let out = SharedSlice::new(y);
        self.for_row_blocks(left.len(), 1, |first, len| {
            let (left, right) = (&left[first..first + len], &right[first..first + len]);
            // SAFETY: blocks do not overlap.
            zip_block(self.features, left, right, unsafe { out.range(first, len) }, &function);
        });
    }

    /// `y = function(y)`.
    pub(crate) fn map_in_place<T: Element>(&self, y: &mut [T], function: impl Fn(f32) -> f32 + Sync) {
        let len = y.len();
        let out = SharedSlice::new(y);
        self.for_row_blocks(len, 1, |first, len| {
            // SAFETY: blocks do not overlap.
            map_block_in_place(self.features, unsafe { out.range(first, len) }, &function);
        });
    }

    /// `y = function(y, x)`.
    pub(crate) fn zip_in_place<T: Element, U: Element>(
        &self,
        y: &mut [T],
        x: &[U],
        function: impl Fn(f32, f32) -> f32 + Sync,
    ) {
        assert_eq!(x.len(), y.len());
        let out = SharedSlice::new(y);
        self.for_row_blocks(x.len(), 1, |first, len| {
            // SAFETY: blocks do not overlap.
            update_block(self.features, unsafe { out.range(first, len) }, &x[first..first + len], &function);
        });
    }

    /// `y = x + bias + residual`, for rows that are as long as `bias`.
    pub(crate) fn add_bias<T: Element, U: Element>(
        &self,
        x: &[T],
        bias: Option<&[f32]>,
        residual: Option<&[f32]>,
        (y, cols): (&mut [U], usize),
    ) {
        assert!(x.len() == y.len() && residual.is_none_or(|residual| residual.len() == y.len()));
        assert!(bias.is_none_or(|bias| bias.len() == cols));
        let out = SharedSlice::new(y);
        self.for_row_blocks(x.len() / cols.max(1), cols, |first, num| {
            for row in first..first + num {
                let range = row * cols..(row + 1) * cols;
                let residual = residual.map(|residual| &residual[range.clone()]);
                // SAFETY: rows do not overlap.
                add_bias_row(self.features, &x[range], bias, residual, unsafe {
                    out.range(row * cols, cols)
                });
            }
        });
    }

    /// `sums[row] = sum of function(left, right)` over the elements of each row of `cols` elements.
    pub(crate) fn zip_sum_rows<T: Element, U: Element>(
        &self,
        (left, right): (&[T], &[U]),
        cols: usize,
        sums: &mut [f32],
        function: impl Fn(f32, f32) -> f32 + Sync,
    ) {
        assert!(left.len() == sums.len() * cols && right.len() == left.len());
        let out = SharedSlice::new(sums);
        self.for_row_blocks(left.len() / cols.max(1), cols, |first, num| {
            // SAFETY: rows do not overlap.
            let sums = unsafe { out.range(first, num) };
            for (row, sum) in (first..).zip(sums) {
                let range = row * cols..(row + 1) * cols;
                *sum = sum_row(self.features, &left[range.clone()], &right[range], &function);
            }
        });
    }

    /// Calls `compute` with each row of `cols` elements of `out`, and its number.
    pub(crate) fn for_each_row(
        &self,
        out: &mut [f32],
        cols: usize,
        compute: impl Fn(usize, &mut [f32]) + Sync,
    ) {
        let num_rows = out.len() / cols.max(1);
        let out = SharedSlice::new(out);
        self.for_row_blocks(num_rows, cols, |first, num| {
            for row in first..first + num {
                // SAFETY: rows do not overlap.
                compute(row, unsafe { out.range(row * cols, cols) });
            }
        });
    }
}
