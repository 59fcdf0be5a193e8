//! Elementwise functions, computed in f32.

use super::Cpu;
use super::element::Element;
use super::simd::{for_each_simd_level, sum_zip};

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
    pub(crate) fn map<T: Element>(&self, x: &[T], y: &mut [T], function: impl Fn(f32) -> f32 + Sync) {
        assert_eq!(x.len(), y.len());
        self.for_each_block(y, |first, y| {
            map_block(self.simd_level, &x[first..first + y.len()], y, &function);
        });
    }

    pub(crate) fn zip<T: Element>(
        &self,
        left: &[T],
        right: &[T],
        y: &mut [T],
        function: impl Fn(f32, f32) -> f32 + Sync,
    ) {
        assert!(left.len() == y.len() && right.len() == y.len());
        self.for_each_block(y, |first, y| {
            let range = first..first + y.len();
            zip_block(self.simd_level, &left[range.clone()], &right[range], y, &function);
        });
    }

    pub(crate) fn map_in_place<T: Element>(&self, y: &mut [T], function: impl Fn(f32) -> f32 + Sync) {
        self.for_each_block(y, |_, y| map_block_in_place(self.simd_level, y, &function));
    }

    pub(crate) fn zip_in_place<T: Element, U: Element>(
        &self,
        y: &mut [T],
        x: &[U],
        function: impl Fn(f32, f32) -> f32 + Sync,
    ) {
        assert_eq!(x.len(), y.len());
        self.for_each_block(y, |first, y| {
            let x = &x[first..first + y.len()];
            update_block(self.simd_level, y, x, &function);
        });
    }

    pub(crate) fn add_bias<T: Element, U: Element>(
        &self,
        x: &[T],
        bias: Option<&[f32]>,
        residual: Option<&[f32]>,
        y: &mut [U],
        cols: usize,
    ) {
        assert!(x.len() == y.len() && residual.is_none_or(|residual| residual.len() == y.len()));
        assert!(bias.is_none_or(|bias| bias.len() == cols));
        self.for_each_row(y, cols, |row, y| {
            let range = row * cols..(row + 1) * cols;
            let residual = residual.map(|residual| &residual[range.clone()]);
            add_bias_row(self.simd_level, &x[range], bias, residual, y);
        });
    }

    pub(crate) fn zip_sum_rows<T: Element, U: Element>(
        &self,
        left: &[T],
        right: &[U],
        cols: usize,
        sums: &mut [f32],
        function: impl Fn(f32, f32) -> f32 + Sync,
    ) {
        assert!(left.len() == sums.len() * cols && right.len() == left.len());
        self.for_each_reduced_row(sums, 1, cols, |row, sum| {
            let range = row * cols..(row + 1) * cols;
            sum[0] = sum_row(self.simd_level, &left[range.clone()], &right[range], &function);
        });
    }
}
