//! Matrix products.
//!
//! Factors are read as 32-bit words: f32, or pairs of bf16 where the machine multiplies them; sums are f32. The right factor is
//! packed once, in panels as wide as the micro-kernel, and shared by all threads; the left one is read where it lies, or
//! packed a panel at a time if it is transposed or of another type. (Goto, van de Geijn: "Anatomy of high-performance
//! matrix multiplication", 2008.)
//!
//! Every element of a result is summed in one order: `inner` is cut into equal blocks of at most 256 words, by
//! `inner` alone, and within a block words are added one by one. So the bits depend neither on threads nor on tiles, nor, in f32 on
//! machines with fused multiply-add, on the width of the registers. Nothing is allocated.

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
mod kernel;
mod pack;
mod tile;
mod words;

use super::element::{Element, Floats, FloatsMut};
use super::{Cpu, SharedSlice};
use crate::precision::Precision;
pub(crate) use kernel::Micro;
use pack::Span;
use tile::{TILE_COLS, TILE_ROWS, TileEpilogue, rounded_tile};
pub(crate) use tile::{Tile, Workspace};

/// Columns of the right factor that are packed at a time; bounds the memory.
const GROUP_COLS: usize = 2048;

/// A matrix in memory: element `(i, j)` is `values[i * row_stride + j * col_stride]`; one of the strides is 1.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix<'a> {
    pub(crate) values: Floats<'a>,
    pub(crate) row_stride: usize,
    pub(crate) col_stride: usize,
}

impl<'a> Matrix<'a> {
    /// A row-major matrix whose rows are `cols` long, or its transpose.
    pub(crate) fn row_major(values: Floats<'a>, cols: usize, transposed: bool) -> Self {
        let (row_stride, col_stride) = if transposed { (1, cols) } else { (cols, 1) };
        Matrix { values, row_stride, col_stride }
    }

    /// The matrix without its first rows and columns.
    pub(crate) fn from(self, row: usize, col: usize) -> Self {
        Matrix { values: self.values.from(row * self.row_stride + col * self.col_stride), ..self }
    }

    /// The same elements with rows and columns exchanged.
    pub(crate) fn transposed(self) -> Self {
        Matrix { row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }

    fn covers(&self, rows: usize, cols: usize) -> bool {
        rows == 0
            || cols == 0
            || (rows - 1) * self.row_stride + (cols - 1) * self.col_stride < self.values.len()
    }
}

/// What the result is added to.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MatmulEpilogue<'a> {
    /// Nothing: the result replaces the destination.
    Overwrite,
    /// The destination's values, which are f32.
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

impl Cpu {
    /// 32-bit words of scratch memory that [`Cpu::matmul`] needs.
    pub(crate) fn matmul_scratch(&self, precision: Precision, size: Product) -> usize {
        let micro = Micro::new(self.features, precision);
        micro.padded_words(size.inner) * size.cols.min(GROUP_COLS).next_multiple_of(micro.cols)
    }

    /// `out = left right + epilogue`, `out` row-major and contiguous; factors are rounded to `precision` as they are packed.
    ///
    /// Cost: `2 rows cols inner` floating-point operations.
    ///
    /// # Panics
    /// If an operand is too small for the sizes, `scratch` smaller than [`Cpu::matmul_scratch`], or a 16-bit result is to be
    /// accumulated.
    pub(crate) fn matmul(
        &self,
        precision: Precision,
        size: Product,
        (left, right): (Matrix<'_>, Matrix<'_>),
        out: FloatsMut<'_>,
        epilogue: MatmulEpilogue<'_>,
        scratch: &mut [u32],
    ) {
        let cols = size.cols;
        assert_eq!(out.len(), size.rows * cols, "the result is {} x {cols}", size.rows);
        assert!(left.covers(size.rows, size.inner), "{left:?} {size:?}");
        match out {
            FloatsMut::F32(out) => {
                let out = SharedSlice::new(out);
                self.for_tiles(precision, size, right, scratch, |at| {
                    // SAFETY: tiles do not overlap, and this task alone has this one.
                    let tile = unsafe { Tile::new(&out, at.row * cols + at.col, cols, at.size) };
                    let epilogue = epilogue.from(at.row, at.col, cols);
                    tile.multiply_packed(at.right, at.right_col, left.from(at.row, 0), epilogue.accumulate);
                    tile.finish(at.right.micro, &epilogue);
                });
            }
            FloatsMut::Bf16(out) => {
                self.matmul_rounded(precision, size, (left, right), out, epilogue, scratch)
            }
            FloatsMut::F16(out) => {
                self.matmul_rounded(precision, size, (left, right), out, epilogue, scratch)
            }
        }
    }

    fn matmul_rounded<T: Element>(
        &self,
        precision: Precision,
        size: Product,
        (left, right): (Matrix<'_>, Matrix<'_>),
        out: &mut [T],
        epilogue: MatmulEpilogue<'_>,
        scratch: &mut [u32],
    ) {
        let cols = size.cols;
        let out = SharedSlice::new(out);
        self.for_tiles(precision, size, right, scratch, |at| {
            let (place, epilogue) = ((at.row * cols + at.col, cols), epilogue.from(at.row, at.col, cols));
            let right = (at.right, at.right_col);
            // SAFETY: tiles do not overlap, and this task alone has this one.
            unsafe { rounded_tile(&out, place, at.size, right, left.from(at.row, 0), &epilogue) };
        });
    }

    /// Packs `right`, and runs `task` for each tile of the result.
    fn for_tiles(
        &self,
        precision: Precision,
        size: Product,
        right: Matrix<'_>,
        scratch: &mut [u32],
        task: impl Fn(TileTask<'_>) + Sync,
    ) {
        let Product { rows, cols, inner } = size;
        let micro = Micro::new(self.features, precision);
        assert!(right.covers(inner, cols), "{right:?} {size:?}");
        for first_col in (0..cols).step_by(GROUP_COLS) {
            let group_cols = GROUP_COLS.min(cols - first_col);
            let panels = PackedRight {
                micro,
                size: Product { cols: group_cols, ..size },
                data: SharedSlice::new(&mut *scratch),
            };
            self.pack_right(&panels, right.from(0, first_col));
            let col_tiles = group_cols.div_ceil(TILE_COLS);
            self.threads.run(rows.div_ceil(TILE_ROWS) * col_tiles, &|index| {
                let (row, right_col) = (index / col_tiles * TILE_ROWS, index % col_tiles * TILE_COLS);
                let size = Product {
                    rows: TILE_ROWS.min(rows - row),
                    cols: TILE_COLS.min(group_cols - right_col),
                    inner,
                };
                task(TileTask { row, col: first_col + right_col, size, right: &panels, right_col });
            });
        }
    }

    fn pack_right(&self, panels: &PackedRight<'_>, right: Matrix<'_>) {
        let (micro, inner) = (panels.micro, panels.size.inner);
        let num_panels = panels.size.cols.div_ceil(micro.cols);
        self.threads.run(num_panels, &|panel| {
            let col = panel * micro.cols;
            let lines = micro.cols.min(panels.size.cols - col);
            for (first, len) in micro.inner_blocks(inner) {
                let (first_term, num_terms) = micro.terms(first, len, inner);
                // SAFETY: panels do not overlap, and this task alone has this one.
                let out = unsafe { panels.data.range(panels.offset(first, len, col), len * micro.cols) };
                let span = Span { inner: num_terms, lines, len };
                pack::right_panel(micro, right.from(first_term, col), span, out);
            }
        });
    }
}

/// One tile of a result, and the panels it is made from.
struct TileTask<'a> {
    row: usize,
    col: usize,
    size: Product,
    right: &'a PackedRight<'a>,
    /// Column of the panels at which the tile begins.
    right_col: usize,
}

/// A right factor in panels: for each block of the inner dim, for each panel of columns, rows of the panel's width.
struct PackedRight<'a> {
    micro: Micro,
    size: Product,
    data: SharedSlice<'a, u32>,
}

impl PackedRight<'_> {
    /// Where the panel that begins at column `col` lies in the block of words `first..first + len`.
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
                residual: residual.map(|residual| &residual[row * cols + col..]),
                residual_stride: cols,
            },
        }
    }
}

#[cfg(test)]
mod tests;
