//! Tiles of a result, one per task.

use super::kernel::MicroTile;
use super::matrix::{Epilogue, MatmulSizes};
use super::operands::{LeftOperand, RightPanels};
use super::pack::{self, LeftBuffer, PanelSpan};
use crate::kernels::cpu::SharedSlice;
use crate::kernels::cpu::element::Element;
use crate::kernels::cpu::simd::{SimdLevel, for_each_simd_level};
use std::marker::PhantomData;
use std::mem::MaybeUninit;

/// Size of a tile of the result. Columns: a block of the right operand (512 KiB) fits into the L2 cache. Rows: full panels for every
/// micro-kernel, and enough tasks for many threads.
pub(super) const TILE_ROWS: usize = 96;
pub(super) const TILE_COLS: usize = 512;

for_each_simd_level! {
    /// Adds bias and residual to `sums` and rounds the result.
    fn put_row<T: Element>(sums: &[f32], bias: Option<&[f32]>, residual: Option<&[f32]>, out: &mut [T]) {
        match (bias, residual) {
            (None, None) => {
                out.iter_mut().zip(sums).for_each(|(out, &sum)| *out = T::from_f32(sum));
            }
            (Some(bias), None) => {
                for ((out, &sum), &bias) in out.iter_mut().zip(sums).zip(bias) {
                    *out = T::from_f32(sum + bias);
                }
            }
            (bias, Some(residual)) => {
                for (index, ((out, &sum), &residual)) in out.iter_mut().zip(sums).zip(residual).enumerate() {
                    *out = T::from_f32(sum + bias.map_or(0.0, |bias| bias[index]) + residual);
                }
            }
        }
    }

    fn add_row(out: &mut [f32], bias: Option<&[f32]>, residual: Option<&[f32]>) {
        if let Some(bias) = bias {
            out.iter_mut().zip(bias).for_each(|(out, &bias)| *out += bias);
        }
        if let Some(residual) = residual {
            out.iter_mut().zip(residual).for_each(|(out, &residual)| *out += residual);
        }
    }
}

/// A tile of a row-major result. It borrows its elements mutably for `'a`.
pub(crate) struct Tile<'a> {
    start: *mut f32,
    row_stride: usize,
    size: MatmulSizes,
    elements: PhantomData<&'a mut [f32]>,
}

impl<'a> Tile<'a> {
    /// Creates the tile of `size.rows x size.cols` that begins at element `offset`.
    ///
    /// # Safety
    /// No other code accesses its elements while the tile exists.
    pub(crate) unsafe fn new(
        out: &SharedSlice<'a, f32>,
        offset: usize,
        row_stride: usize,
        size: MatmulSizes,
    ) -> Self {
        assert!(offset + extent(row_stride, size) <= out.len, "the tile lies in the result");
        // SAFETY: in bounds by the line above.
        Tile { start: unsafe { out.as_ptr().add(offset) }, row_stride, size, elements: PhantomData }
    }

    /// Creates a tile that covers a buffer.
    pub(crate) fn whole(out: &'a mut [f32], size: MatmulSizes) -> Self {
        assert_eq!(out.len(), size.rows * size.cols);
        Tile { start: out.as_mut_ptr(), row_stride: size.cols, size, elements: PhantomData }
    }

    /// Computes the product of two operands in uninitialized memory.
    fn of_product(
        memory: &'a mut [MaybeUninit<f32>],
        size: MatmulSizes,
        left: LeftOperand<'_>,
        right: RightPanels<'_>,
    ) -> Self {
        assert!(size.rows * size.cols <= memory.len());
        let start = memory.as_mut_ptr().cast();
        let mut tile = Tile { start, row_stride: size.cols, size, elements: PhantomData };
        // `multiply` writes every element before reading it and creates no reference to uninitialized elements.
        tile.multiply(left, right, false);
        tile
    }

    pub(crate) fn row(&mut self, row: usize) -> &mut [f32] {
        assert!(row < self.size.rows);
        // SAFETY: the row is in the result, as `new` has checked, and the tile borrows it mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.row_stride), self.size.cols) }
    }

    /// Returns the part of the tile that one call of the micro-kernel computes.
    fn part(&mut self, row: usize, rows: usize, col: usize, cols: usize) -> MicroTile {
        assert!(row + rows <= self.size.rows && col + cols <= self.size.cols);
        // SAFETY: within the tile by the line above.
        let start = unsafe { self.start.add(row * self.row_stride + col) };
        MicroTile { start, row_stride: self.row_stride, rows, cols }
    }

    /// Computes `tile = left right`, or adds the product if `accumulate` is set. Without `accumulate`, no element is read before it is
    /// written. Runs on the calling thread. Packs a left operand in memory one panel at a time, unless it can be read in place.
    ///
    /// The right operand may have more terms than the product if all of them fit into one block of the inner dim; only the first ones are
    /// used.
    pub(crate) fn multiply(&mut self, left: LeftOperand<'_>, right: RightPanels<'_>, accumulate: bool) {
        let MatmulSizes { rows, cols, inner } = self.size;
        let micro = right.micro;
        if inner == 0 && !accumulate {
            for row in 0..rows {
                let MicroTile { start, .. } = self.part(row, 1, 0, cols);
                // SAFETY: a row of this tile. All bits zero is 0.0.
                unsafe { start.write_bytes(0, cols) };
            }
        }
        let _session = micro.begin();
        let mut buffer = LeftBuffer::new();
        for (block, (first, len)) in micro.inner_blocks(inner).enumerate() {
            let (first_term, num_terms) = micro.terms(first, len, inner);
            let right_block = (first, right.block_len(first));
            for row in (0..rows).step_by(micro.rows) {
                let panel_rows = micro.rows.min(rows - row);
                let span = PanelSpan { inner: num_terms, lines: panel_rows, len };
                let left = match left {
                    LeftOperand::InMemory(left) => {
                        pack::left_panel(micro, left.submatrix(row, first_term), span, &mut buffer)
                    }
                    LeftOperand::Packed(panels, first_row) => {
                        panels.panel(first_row + row, block, first, len)
                    }
                };
                for col in (0..cols).step_by(micro.cols) {
                    let panel = right.panel(right_block, len, col);
                    let part = self.part(row, panel_rows, col, micro.cols.min(cols - col));
                    // SAFETY: a part of this tile, which the caller owns; the left panel covers the rows.
                    unsafe { micro.run(len, left, panel, part, accumulate || first > 0) };
                }
            }
        }
    }

    /// Adds bias and residual to the product.
    pub(super) fn add_epilogue(&mut self, simd_level: SimdLevel, epilogue: &Epilogue<'_>) {
        if epilogue.bias.is_none() && epilogue.residual.is_none() {
            return;
        }
        for row in 0..self.size.rows {
            let [bias, residual] = epilogue.of_row(row, self.row_stride, self.size.cols);
            add_row(simd_level, self.row(row), bias, residual);
        }
    }
}

/// Computes a tile of 16-bit elements: sums in an f32 buffer and rounds the sums into the result.
///
/// # Safety
/// No other code accesses the elements of the tile of `size` at `offset` of `out`.
pub(super) unsafe fn rounded_tile<T: Element>(
    out: &SharedSlice<'_, T>,
    offset: usize,
    row_stride: usize,
    size: MatmulSizes,
    left: LeftOperand<'_>,
    right: RightPanels<'_>,
    epilogue: &Epilogue<'_>,
) {
    assert!(offset + extent(row_stride, size) <= out.len, "the tile lies in the result");
    let mut sums = [const { MaybeUninit::<f32>::uninit() }; TILE_ROWS * TILE_COLS];
    assert!(!epilogue.accumulate);
    let mut tile = Tile::of_product(&mut sums, size, left, right);
    for row in 0..size.rows {
        // SAFETY: in bounds by the assertion; only the caller accesses the tile.
        let out = unsafe { out.range(offset + row * row_stride, size.cols) };
        let [bias, residual] = epilogue.of_row(row, row_stride, size.cols);
        put_row(right.micro.simd_level, tile.row(row), bias, residual, out);
    }
}

/// Returns the number of elements from the first of a tile to its last.
fn extent(row_stride: usize, size: MatmulSizes) -> usize {
    if size.rows == 0 || size.cols == 0 { 0 } else { (size.rows - 1) * row_stride + size.cols }
}
