//! Copies, permutations, gathers, and sums over a dim.

use super::element::Element;
use super::reduce::{COLUMN_BLOCK, sum_rows};
use super::simd::{for_each_simd_level, sum_zip};
use super::{Cpu, SharedSlice};

/// Blocks of equal length at a constant stride.
#[derive(Debug, Clone, Copy)]
pub(crate) struct StridedBlocks {
    /// First element of the first block.
    pub(crate) offset: usize,
    /// Elements between the starts of consecutive blocks.
    pub(crate) stride: usize,
}

for_each_simd_level! {
    fn sum_columns<T: Element>(x: &[T], rows: usize, stride: usize, first: usize, factor: f32, y: &mut [T]) {
        let width = y.len();
        let sums = sum_rows(rows, width, |row, partial| {
            let row = &x[row * stride + first..row * stride + first + width];
            partial.iter_mut().zip(row).for_each(|(partial, x)| *partial += x.to_f32());
        });
        y.iter_mut().zip(&sums).for_each(|(y, sum)| *y = T::from_f32(factor * sum));
    }

    fn sum_elements<T: Element>(x: &[T], factor: f32, y: &mut T) {
        *y = T::from_f32(factor * sum_zip(x, x, x, |x, _, _| x.to_f32()));
    }

    fn scale_block<T: Element>(x: &[T], factor: f32, y: &mut [T]) {
        y.iter_mut().zip(x).for_each(|(y, x)| *y = T::from_f32(factor * x.to_f32()));
    }
}

impl Cpu {
    pub(crate) fn copy_blocks<T: Copy + Send + Sync>(
        &self,
        x: &[T],
        from: StridedBlocks,
        y: &mut [T],
        to: StridedBlocks,
        num_blocks: usize,
        len: usize,
    ) {
        assert!(num_blocks <= 1 || to.stride >= len, "blocks of {len} at a distance of {}", to.stride);
        let out = SharedSlice::new(y);
        self.for_row_blocks(num_blocks, len, |first, num| {
            for block in first..first + num {
                let start = from.offset + block * from.stride;
                // SAFETY: blocks do not overlap, as asserted above.
                let out = unsafe { out.range(to.offset + block * to.stride, len) };
                out.copy_from_slice(&x[start..start + len]);
            }
        });
    }

    pub(crate) fn permute<T: Copy + Send + Sync>(
        &self,
        x: &[T],
        strides: [usize; 4],
        y: &mut [T],
        dims: [usize; 4],
    ) {
        assert!(x.len() == y.len() && y.len() == dims.iter().product::<usize>());
        let cols = dims[3];
        self.for_each_row(y, cols, |row, out| {
            let indices = [row / dims[2] / dims[1], row / dims[2] % dims[1], row % dims[2]];
            let start = indices.iter().zip(strides).map(|(place, stride)| place * stride).sum();
            match strides[3] {
                1 => out.copy_from_slice(&x[start..start + cols]),
                stride => out.iter_mut().zip(x[start..].iter().step_by(stride)).for_each(|(y, x)| *y = *x),
            }
        });
    }

    /// Computes `y[o, i] = factor * sum over d of x[o, d, i]` for `x` of shape `[outer, dim, inner]`. The sum over `d` has lanes as in
    /// [`sum_zip`] if `inner` is 1; otherwise, it is computed in blocks of rows as in [`sum_rows`].
    pub(crate) fn sum_dim<T: Element>(
        &self,
        x: &[T],
        [outer, dim, inner]: [usize; 3],
        factor: f32,
        y: &mut [T],
    ) {
        assert!(x.len() == outer * dim * inner && y.len() == outer * inner);
        if inner == 1 {
            return self.for_each_reduced_row(y, 1, dim, |row, y| {
                sum_elements(self.simd_level, &x[row * dim..(row + 1) * dim], factor, &mut y[0]);
            });
        }
        let out = SharedSlice::new(y);
        let num_blocks = inner.div_ceil(COLUMN_BLOCK);
        self.threads.run(outer * num_blocks, &|task| {
            let (outer, first) = (task / num_blocks, task % num_blocks * COLUMN_BLOCK);
            // SAFETY: blocks do not overlap.
            let out = unsafe { out.range(outer * inner + first, COLUMN_BLOCK.min(inner - first)) };
            let x = &x[outer * dim * inner..(outer + 1) * dim * inner];
            sum_columns(self.simd_level, x, dim, inner, first, factor, out);
        });
    }

    pub(crate) fn broadcast_dim<T: Element>(
        &self,
        x: &[T],
        [outer, dim, inner]: [usize; 3],
        factor: f32,
        y: &mut [T],
    ) {
        assert!(y.len() == outer * dim * inner && x.len() == outer * inner);
        self.for_each_row(y, inner, |block, out| {
            let start = block / dim * inner;
            scale_block(self.simd_level, &x[start..start + inner], factor, out);
        });
    }

    pub(crate) fn gather_rows<T: Copy + Send + Sync>(&self, x: &[T], ids: &[u32], cols: usize, y: &mut [T]) {
        assert_eq!(y.len(), ids.len() * cols);
        self.for_each_row(y, cols, |row, out| {
            let start = ids[row] as usize * cols;
            out.copy_from_slice(&x[start..start + cols]);
        });
    }
}
