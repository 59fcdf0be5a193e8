//! Matrix products.
//!
//! The right factor is packed once, in panels as wide as the micro-kernel, and shared by all threads; the left one is
//! read where it lies, or packed a panel at a time if its rows are strided. (Goto, van de Geijn: "Anatomy of high-performance
//! matrix multiplication", 2008.)
//!
//! Every element of a result is summed in one order: `inner` is cut into equal blocks of at most [`INNER_BLOCK`], by
//! `inner` alone, and within a block terms are added one by one. So the bits depend neither on threads nor on tiles, nor, on machines
//! with fused multiply-add, on the width of the registers. Nothing is allocated.

mod kernel;
mod pack;

use super::{Cpu, SharedSlice};
use kernel::{Micro, MicroTile};

/// Terms summed in registers before they are added to the result: a panel of the right factor (32 KiB) stays in the
/// first-level cache.
const INNER_BLOCK: usize = 256;

/// Tiles of the result, one a task. Columns: a block of the right factor (512 KiB) stays in the second-level cache.
/// Rows: whole panels of every micro-kernel, and tasks enough for many threads.
const TILE_ROWS: usize = 96;
const TILE_COLS: usize = 512;

/// Columns of the right factor that are packed at a time; bounds the memory.
const GROUP_COLS: usize = 2048;

/// A matrix in memory: element `(i, j)` is `data[i * row_stride + j * col_stride]`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) row_stride: usize,
    pub(crate) col_stride: usize,
}

impl<'a> Matrix<'a> {
    /// A row-major matrix whose rows are `cols` long, or its transpose.
    pub(crate) fn row_major(data: &'a [f32], cols: usize, transposed: bool) -> Self {
        let (row_stride, col_stride) = if transposed { (1, cols) } else { (cols, 1) };
        Matrix { data, row_stride, col_stride }
    }

    /// The matrix without its first rows and columns.
    pub(crate) fn from(self, row: usize, col: usize) -> Self {
        Matrix { data: &self.data[row * self.row_stride + col * self.col_stride..], ..self }
    }

    /// The same elements with rows and columns exchanged.
    pub(crate) fn transposed(self) -> Self {
        Matrix { row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }

    fn covers(&self, rows: usize, cols: usize) -> bool {
        rows == 0
            || cols == 0
            || (rows - 1) * self.row_stride + (cols - 1) * self.col_stride < self.data.len()
    }
}

/// What the result is added to.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MatmulEpilogue<'a> {
    /// Nothing: the result replaces the destination.
    Overwrite,
    /// The destination's values.
    Accumulate,
    /// Optional vectors and matrices: a bias for each column, a residual of the result's shape.
    Add {
        /// One value a column.
        bias: Option<&'a [f32]>,
        /// Row-major, of the result's shape.
        residual: Option<&'a [f32]>,
    },
}

/// Sizes of a product: `rows x inner` times `inner x cols`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Product {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) inner: usize,
}

impl Product {
    /// First index and length of each block of the inner dim: equal but for the last.
    fn inner_blocks(self) -> impl Iterator<Item = (usize, usize)> {
        let len = self.inner.div_ceil(self.inner.div_ceil(INNER_BLOCK).max(1)).max(1);
        (0..self.inner).step_by(len).map(move |first| (first, len.min(self.inner - first)))
    }
}

impl Cpu {
    /// f32 elements of scratch memory that [`Cpu::matmul`] needs.
    pub(crate) fn matmul_scratch(&self, size: Product) -> usize {
        size.inner * size.cols.min(GROUP_COLS).next_multiple_of(Micro::new(self.features).cols)
    }

    /// `out = left right + epilogue`, `out` row-major and contiguous.
    ///
    /// Cost: `2 rows cols inner` floating-point operations.
    ///
    /// # Panics
    /// If an operand is too small for the sizes, or `scratch` smaller than [`Cpu::matmul_scratch`].
    pub(crate) fn matmul(
        &self,
        size: Product,
        left: Matrix<'_>,
        right: Matrix<'_>,
        out: &mut [f32],
        epilogue: MatmulEpilogue<'_>,
        scratch: &mut [f32],
    ) {
        let Product { rows, cols, inner } = size;
        assert_eq!(out.len(), rows * cols, "the result is {rows} x {cols}");
        assert!(left.covers(rows, inner) && right.covers(inner, cols), "{left:?} {right:?} {size:?}");
        let micro = Micro::new(self.features);
        let out = SharedSlice::new(out);
        for first_col in (0..cols).step_by(GROUP_COLS) {
            let group_cols = GROUP_COLS.min(cols - first_col);
            let group = Product { cols: group_cols, ..size };
            let panels = PackedRight::new(micro, group, scratch);
            self.pack_right(&panels, right.from(0, first_col));
            let col_tiles = group_cols.div_ceil(TILE_COLS);
            self.threads.run(rows.div_ceil(TILE_ROWS) * col_tiles, &|task| {
                let (row, col) = (task / col_tiles * TILE_ROWS, task % col_tiles * TILE_COLS);
                let size =
                    Product { rows: TILE_ROWS.min(rows - row), cols: TILE_COLS.min(group_cols - col), inner };
                // SAFETY: tiles do not overlap, and this task alone has this one.
                let tile = unsafe { Tile::new(&out, row * cols + first_col + col, cols, size) };
                tile.multiply_packed(
                    &panels,
                    col,
                    left.from(row, 0),
                    &epilogue.from(row, first_col + col, cols),
                );
            });
        }
    }

    fn pack_right(&self, panels: &PackedRight<'_>, right: Matrix<'_>) {
        let micro = panels.micro;
        let num_panels = panels.size.cols.div_ceil(micro.cols);
        self.threads.run(num_panels, &|panel| {
            let col = panel * micro.cols;
            let cols = micro.cols.min(panels.size.cols - col);
            for (first, len) in panels.size.inner_blocks() {
                // SAFETY: panels do not overlap, and this task alone has this one.
                let out = unsafe { panels.data.range(panels.offset(first, len, col), len * micro.cols) };
                pack::right_panel(self.features, right.from(first, col), len, cols, micro.cols, out);
            }
        });
    }
}

/// A right factor in panels: for each block of the inner dim, for each panel of columns, rows of the panel's width.
struct PackedRight<'a> {
    micro: Micro,
    size: Product,
    data: SharedSlice<'a, f32>,
}

impl<'a> PackedRight<'a> {
    fn new(micro: Micro, size: Product, scratch: &'a mut [f32]) -> Self {
        PackedRight { micro, size, data: SharedSlice::new(scratch) }
    }

    /// Where the panel that begins at column `col` lies in the block `first..first + len`.
    fn offset(&self, first: usize, len: usize, col: usize) -> usize {
        first * self.size.cols.next_multiple_of(self.micro.cols) + len * col
    }
}

impl<'a> MatmulEpilogue<'a> {
    /// The epilogue of the part of a result of width `cols` that begins at `(row, col)`.
    fn from(&self, row: usize, col: usize, cols: usize) -> TileEpilogue<'a> {
        match *self {
            MatmulEpilogue::Overwrite => TileEpilogue::default(),
            MatmulEpilogue::Accumulate => TileEpilogue { accumulate: true, ..TileEpilogue::default() },
            MatmulEpilogue::Add { bias, residual } => TileEpilogue {
                accumulate: false,
                bias: bias.map(|bias| &bias[col..]),
                residual: residual
                    .map(|residual| Matrix::row_major(&residual[row * cols + col..], cols, false)),
            },
        }
    }
}

/// What a tile is added to.
#[derive(Clone, Copy, Default)]
struct TileEpilogue<'a> {
    accumulate: bool,
    bias: Option<&'a [f32]>,
    residual: Option<Matrix<'a>>,
}

/// A rectangle of a row-major result that one task owns.
pub(crate) struct Tile {
    start: *mut f32,
    row_stride: usize,
    size: Product,
}

impl Tile {
    /// The rectangle of `size.rows x size.cols` that begins at element `offset`.
    ///
    /// # Safety
    /// While the tile lives, no one else reaches its elements.
    pub(crate) unsafe fn new(
        out: &SharedSlice<'_, f32>,
        offset: usize,
        row_stride: usize,
        size: Product,
    ) -> Self {
        let last =
            if size.rows == 0 || size.cols == 0 { 0 } else { (size.rows - 1) * row_stride + size.cols };
        assert!(offset + last <= out.len, "the tile lies in the result");
        // SAFETY: in bounds by the line above.
        Tile { start: unsafe { out.as_ptr().add(offset) }, row_stride, size }
    }

    /// A tile that is a whole buffer.
    pub(crate) fn whole(out: &mut [f32], size: Product) -> Self {
        assert_eq!(out.len(), size.rows * size.cols);
        Tile { start: out.as_mut_ptr(), row_stride: size.cols, size }
    }

    /// The same rectangle as the result of a product of other inner size.
    pub(crate) fn with_size(&self, size: Product) -> Self {
        assert!(size.rows <= self.size.rows && size.cols <= self.size.cols, "{size:?} in {:?}", self.size);
        Tile { size, ..*self }
    }

    /// A row of the rectangle.
    #[allow(clippy::mut_from_ref)]
    pub(crate) fn row(&self, row: usize) -> &mut [f32] {
        assert!(row < self.size.rows);
        // SAFETY: rows of the tile lie in the result (checked in `new`) and belong to the tile's owner.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.row_stride), self.size.cols) }
    }

    /// The part of the tile that one call of the micro-kernel makes.
    fn part(&self, row: usize, rows: usize, col: usize, cols: usize) -> MicroTile {
        assert!(row + rows <= self.size.rows && col + cols <= self.size.cols);
        // SAFETY: within the tile by the line above.
        let start = unsafe { self.start.add(row * self.row_stride + col) };
        MicroTile { start, row_stride: self.row_stride, rows, cols }
    }

    /// `tile = left right`, plus the tile where `accumulate` is set, for factors small enough to be packed on the
    /// way. Runs on the calling thread.
    pub(crate) fn multiply(
        &self,
        features: super::simd::CpuFeatures,
        left: Matrix<'_>,
        right: Matrix<'_>,
        accumulate: bool,
    ) {
        let Product { rows, cols, inner } = self.size;
        assert!(left.covers(rows, inner) && right.covers(inner, cols), "operands cover the product");
        if inner == 0 && !accumulate {
            (0..rows).for_each(|row| self.row(row).fill(0.0));
        }
        let micro = Micro::new(features);
        let mut panel = [0.0_f32; INNER_BLOCK * kernel::COLS_MAX];
        for (first, len) in self.size.inner_blocks() {
            for col in (0..cols).step_by(micro.cols) {
                let panel_cols = micro.cols.min(cols - col);
                let panel = &mut panel[..len * micro.cols];
                pack::right_panel(features, right.from(first, col), len, panel_cols, micro.cols, panel);
                for row in (0..rows).step_by(micro.rows) {
                    let part = self.part(row, micro.rows.min(rows - row), col, panel_cols);
                    // SAFETY: a part of this tile, whose owner calls.
                    unsafe { micro.run(len, left.from(row, first), panel, part, accumulate || first > 0) };
                }
            }
        }
    }

    /// As [`Tile::multiply`] with a packed right factor, from its column `right_col` on.
    fn multiply_packed(
        &self,
        right: &PackedRight<'_>,
        right_col: usize,
        left: Matrix<'_>,
        epilogue: &TileEpilogue<'_>,
    ) {
        let Product { rows, cols, inner } = self.size;
        let micro = right.micro;
        if inner == 0 && !epilogue.accumulate {
            (0..rows).for_each(|row| self.row(row).fill(0.0));
        }
        let mut left_panel = [0.0_f32; INNER_BLOCK * kernel::ROWS_MAX];
        for (first, len) in self.size.inner_blocks() {
            for row in (0..rows).step_by(micro.rows) {
                let panel_rows = micro.rows.min(rows - row);
                let mut left = left.from(row, first);
                if left.col_stride != 1 {
                    left = pack::left_panel(left, panel_rows, len, micro.rows, &mut left_panel);
                }
                for col in (0..cols).step_by(micro.cols) {
                    let offset = right.offset(first, len, right_col + col);
                    // SAFETY: packing has ended, and no one writes to the panels.
                    let panel = unsafe { right.data.range(offset, len * micro.cols) };
                    let part = self.part(row, panel_rows, col, micro.cols.min(cols - col));
                    // SAFETY: a part of this tile, whose owner calls.
                    unsafe { micro.run(len, left, panel, part, epilogue.accumulate || first > 0) };
                }
            }
        }
        self.finish(epilogue);
    }

    fn finish(&self, epilogue: &TileEpilogue<'_>) {
        if epilogue.bias.is_none() && epilogue.residual.is_none() {
            return;
        }
        for row in 0..self.size.rows {
            let out = self.row(row);
            if let Some(bias) = epilogue.bias {
                out.iter_mut().zip(bias).for_each(|(out, &bias)| *out += bias);
            }
            if let Some(residual) = epilogue.residual {
                let residual = &residual.from(row, 0).data[..self.size.cols];
                out.iter_mut().zip(residual).for_each(|(out, &residual)| *out += residual);
            }
        }
    }
}

#[cfg(test)]
mod tests;
