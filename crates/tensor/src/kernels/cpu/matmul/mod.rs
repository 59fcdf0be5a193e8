//! Matmuls.
//!
//! Operands are read as 32-bit words: f32, or pairs of bf16 on machines that multiply them; sums are f32. The right operand is packed once,
//! in panels as wide as the micro-kernel, and shared by all threads. The left operand is read in place, or packed one panel at a time if it
//! is transposed or of another dtype. (Goto, van de Geijn: "Anatomy of high-performance matrix multiplication", 2008.)
//!
//! Every element of a result is summed in the same order: `inner` alone determines how the inner dim is split into blocks of at most 256
//! words, and the words of a block are added one by one (by AMX, sixteen at a time). Results therefore do not depend on threads or tiles.
//! In f32, on machines with fused multiply-add, they do not depend on the register width either. Matmuls do not allocate.
//!
//! The crate `gemm` does not fit these rules: it allocates packing buffers on every call, splits work by the number of threads, and sums in
//! an order that depends on the sizes of caches.

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
mod grouped;
mod kernel;
mod matrix;
mod operands;
mod pack;
#[cfg(target_arch = "x86_64")]
mod pairs;
mod tile;
mod words;

use super::arena::ALIGNMENT;
use super::element::{Element, FloatsMut};
use super::{Cpu, SharedSlice};
use crate::precision::Precision;
pub use grouped::GroupLimit;
pub(crate) use grouped::GroupedOperands;
pub(crate) use kernel::MicroKernel;
pub use matrix::MatmulSizes;
pub(crate) use matrix::{Epilogue, Matrix};
pub(crate) use operands::{LeftOperand, RightPanels};
use operands::{PackedLeft, pack_panel};
use pack::PanelSpan;
pub(crate) use tile::Tile;
use tile::{TILE_COLS, TILE_ROWS, rounded_tile};
use trireme_base::Bf16;

/// Number of columns of the right operand that are packed at a time. Bounds the scratch memory.
const PACKED_COLS: usize = 2048;

/// Returns the 32-bit words of scratch memory for the bf16 values of an fp8 operand, rounded up so that what follows is aligned.
pub(crate) fn fp8_scratch_words(num_elements: usize) -> usize {
    (num_elements * size_of::<Bf16>()).next_multiple_of(ALIGNMENT) / size_of::<u32>()
}

impl Cpu {
    /// Returns the number of 32-bit words of scratch memory that [`Cpu::matmul`] needs.
    pub(crate) fn matmul_scratch(&self, precision: Precision, size: MatmulSizes, left: Matrix<'_>) -> usize {
        let micro = MicroKernel::new(self.simd_level, precision);
        let left = if packs_left(micro, size, left) { PackedLeft::num_words(micro, size) } else { 0 };
        left + RightPanels::num_words(micro, size.inner, size.cols.min(PACKED_COLS))
    }

    /// Computes `out = left right + epilogue` for a contiguous, row-major `out`. Operands are rounded to `precision` as they are packed.
    ///
    /// Cost: `2 rows cols inner` floating-point operations. Panics if an operand is too small for the sizes, if `scratch` is smaller than
    /// [`Cpu::matmul_scratch`], or if a 16-bit result is to be accumulated.
    pub(crate) fn matmul(
        &self,
        precision: Precision,
        size: MatmulSizes,
        operands: (Matrix<'_>, Matrix<'_>),
        out: FloatsMut<'_>,
        epilogue: Epilogue<'_>,
        scratch: &mut [u32],
    ) {
        let cols = size.cols;
        assert_eq!(Some(out.len()), size.rows.checked_mul(cols), "the result is {} x {cols}", size.rows);
        assert!(operands.0.covers(size.rows, size.inner), "{:?} {size:?}", operands.0);
        match out {
            FloatsMut::F32(out) => {
                let out = SharedSlice::new(out);
                self.for_tiles(precision, size, operands, scratch, |at| {
                    // SAFETY: tiles do not overlap, and only this task accesses this tile.
                    let mut tile = unsafe { Tile::new(&out, at.row * cols + at.col, cols, at.size) };
                    let epilogue = epilogue.for_tile(at.row, at.col, cols);
                    tile.multiply(at.left, at.right, epilogue.accumulate);
                    tile.add_epilogue(self.simd_level, &epilogue);
                });
            }
            FloatsMut::Bf16(out) => self.matmul_rounded(precision, size, operands, out, epilogue, scratch),
            FloatsMut::F16(out) => self.matmul_rounded(precision, size, operands, out, epilogue, scratch),
        }
    }

    fn matmul_rounded<T: Element>(
        &self,
        precision: Precision,
        size: MatmulSizes,
        operands: (Matrix<'_>, Matrix<'_>),
        out: &mut [T],
        epilogue: Epilogue<'_>,
        scratch: &mut [u32],
    ) {
        let cols = size.cols;
        let out = SharedSlice::new(out);
        self.for_tiles(precision, size, operands, scratch, |at| {
            let (offset, epilogue) = (at.row * cols + at.col, epilogue.for_tile(at.row, at.col, cols));
            // SAFETY: tiles do not overlap, and only this task accesses this tile.
            unsafe { rounded_tile(&out, offset, cols, at.size, at.left, at.right, &epilogue) };
        });
    }

    /// Packs the operands and runs `task` for each tile of the result.
    fn for_tiles(
        &self,
        precision: Precision,
        size: MatmulSizes,
        (left, right): (Matrix<'_>, Matrix<'_>),
        scratch: &mut [u32],
        task: impl Fn(TileTask<'_>) + Sync,
    ) {
        let MatmulSizes { rows, cols, inner } = size;
        let micro = MicroKernel::new(self.simd_level, precision);
        assert!(right.covers(inner, cols), "{right:?} {size:?}");
        let group_words = RightPanels::num_words(micro, inner, cols.min(PACKED_COLS));
        let (scratch, left_words) = scratch.split_at_mut(group_words);
        let packed = packs_left(micro, size, left).then(|| self.pack_left(micro, size, left, left_words));
        for first_col in (0..cols).step_by(PACKED_COLS) {
            let group_cols = PACKED_COLS.min(cols - first_col);
            let panels = self.pack_right(micro, (inner, group_cols), right.submatrix(0, first_col), scratch);
            let col_tiles = group_cols.div_ceil(TILE_COLS);
            let tile_rows = tile_rows(rows, micro.rows, col_tiles, self.threads.num_threads());
            self.threads.run(rows.div_ceil(tile_rows) * col_tiles, &|index| {
                let (row, right_col) = (index / col_tiles * tile_rows, index % col_tiles * TILE_COLS);
                let size = MatmulSizes {
                    rows: tile_rows.min(rows - row),
                    cols: TILE_COLS.min(group_cols - right_col),
                    inner,
                };
                let left = match &packed {
                    Some(packed) => LeftOperand::Packed(packed, row),
                    None => LeftOperand::InMemory(left.submatrix(row, 0)),
                };
                task(TileTask {
                    row,
                    col: first_col + right_col,
                    size,
                    left,
                    right: panels.columns_from(right_col),
                });
            });
        }
    }

    fn pack_left<'a>(
        &self,
        micro: MicroKernel,
        size: MatmulSizes,
        left: Matrix<'_>,
        words: &'a mut [u32],
    ) -> PackedLeft<'a> {
        let out = SharedSlice::new(&mut *words);
        self.threads.run(size.rows.div_ceil(micro.rows), &|panel| {
            let row = panel * micro.rows;
            let lines = micro.rows.min(size.rows - row);
            for (block, (first, len)) in micro.inner_blocks(size.inner).enumerate() {
                let (first_term, num_terms) = micro.terms(first, len, size.inner);
                let place = PackedLeft::panel_range(micro, size.inner, row, block, first, len);
                // SAFETY: panels do not overlap, and only this task accesses this one.
                let out = unsafe { out.range(place.start, place.len()) };
                let span = PanelSpan { inner: num_terms, lines, len };
                pack::pack_left_panel(micro, left.submatrix(row, first_term), span, out);
            }
        });
        PackedLeft { micro, inner: size.inner, by_rows: pack::is_packed_by_rows(micro, left), words }
    }

    fn pack_right<'a>(
        &self,
        micro: MicroKernel,
        (inner, cols): (usize, usize),
        right: Matrix<'_>,
        words: &'a mut [u32],
    ) -> RightPanels<'a> {
        let out = SharedSlice::new(&mut *words);
        self.threads.run(cols.div_ceil(micro.cols), &|panel| {
            // SAFETY: only this task accesses this panel.
            unsafe { pack_panel(micro, (inner, cols), right, panel * micro.cols, &out) };
        });
        RightPanels::new(micro, (inner, cols), words)
    }
}

/// Chooses the number of rows of a tile, so that threads finish at about the same time. It is a multiple of `panel_rows`, at most
/// `TILE_ROWS`.
fn tile_rows(rows: usize, panel_rows: usize, col_tiles: usize, num_threads: usize) -> usize {
    let (num_panels, max_panels) = (rows.div_ceil(panel_rows), TILE_ROWS / panel_rows);
    // Work of the busiest thread, in panels, if threads take tasks in turns; the last tasks may be smaller.
    let longest = |tile: usize| {
        let (num_tasks, rest) = (num_panels.div_ceil(tile) * col_tiles, num_panels % tile);
        let only_small_ones_last = (1..=col_tiles).contains(&(num_tasks % num_threads)) && rest > 0;
        let rounds = num_tasks.div_ceil(num_threads);
        if only_small_ones_last { (rounds - 1) * tile + rest } else { rounds * tile }
    };
    // Smaller tiles read the right operand more often. Half the size counts as 1/32 slower.
    let cost = |tile: usize| longest(tile) * (17 * max_panels - tile);
    let tiles = (max_panels.div_ceil(2)..=max_panels).rev();
    tiles.min_by_key(|&tile| cost(tile)).expect("a tile has a panel") * panel_rows
}

/// One tile of a result and its operands.
struct TileTask<'a> {
    row: usize,
    col: usize,
    size: MatmulSizes,
    left: LeftOperand<'a>,
    right: RightPanels<'a>,
}

/// Returns whether the left operand is packed once for all tiles: if it cannot be read in place and several tiles read the same rows.
fn packs_left(micro: MicroKernel, size: MatmulSizes, left: Matrix<'_>) -> bool {
    size.cols > TILE_COLS && !pack::can_read_in_place(micro, left, size.inner)
}

#[cfg(test)]
mod tests;
