//! Softmax of rows.

use super::Cpu;
use super::element::Element;
use super::simd::{LANES, exp, for_each_simd_level, sum_lanes};

for_each_simd_level! {
    fn forward_row<T: Element>(x: &[T], y: &mut [T]) {
        let largest = x.iter().fold(f32::NEG_INFINITY, |largest, x| largest.max(x.to_f32()));
        let mut lanes = [0.0_f32; LANES];
        for (index, x) in x.iter().enumerate() {
            lanes[index % LANES] += exp(x.to_f32() - largest);
        }
        let scale = 1.0 / sum_lanes(lanes);
        y.iter_mut().zip(x).for_each(|(y, x)| *y = T::from_f32(scale * exp(x.to_f32() - largest)));
    }

    fn backward_row<T: Element>(y: &[T], dy: &mut [T]) {
        let mut lanes = [0.0_f32; LANES];
        for (index, (y, dy)) in y.iter().zip(&*dy).enumerate() {
            lanes[index % LANES] += y.to_f32() * dy.to_f32();
        }
        let mean = sum_lanes(lanes);
        dy.iter_mut().zip(y).for_each(|(dy, y)| *dy = T::from_f32(y.to_f32() * (dy.to_f32() - mean)));
    }
}

impl Cpu {
    pub(crate) fn softmax<T: Element>(&self, x: &[T], cols: usize, y: &mut [T]) {
        assert_eq!(x.len(), y.len());
        self.for_each_row(y, cols, |row, y| {
            forward_row(self.simd_level, &x[row * cols..(row + 1) * cols], y);
        });
    }

    pub(crate) fn softmax_backward<T: Element>(&self, y: &[T], cols: usize, dy: &mut [T]) {
        assert_eq!(y.len(), dy.len());
        self.for_each_row(dy, cols, |row, dy| {
            backward_row(self.simd_level, &y[row * cols..(row + 1) * cols], dy);
        });
    }
}
