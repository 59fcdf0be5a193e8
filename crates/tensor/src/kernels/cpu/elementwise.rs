//! Elementwise functions, computed in f32.

use super::Cpu;
use super::element::Element;
use super::simd::for_each_simd_level;

for_each_simd_level! {
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
}

impl Cpu {
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
}
