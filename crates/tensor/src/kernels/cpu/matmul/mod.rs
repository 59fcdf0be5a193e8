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
#[cfg(target_arch = "x86_64")]
mod pairs;
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
    pub(crate) fn matmul_scratch(&self, precision: Precision, size: Product, left: Matrix<'_>) -> usize {
        let micro = Micro::new(self.features, precision);
        let left = if packs_left(micro, size, left) { PackedLeft::num_words(micro, size) } else { 0 };
        left + PackedRight::num_words(micro, size)
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
                self.for_tiles(precision, size, (left, right), scratch, |at| {
                    // SAFETY: tiles do not overlap, and this task alone has this one.
                    let tile = unsafe { Tile::new(&out, at.row * cols + at.col, cols, at.size) };
                    let epilogue = epilogue.from(at.row, at.col, cols);
                    tile.multiply_packed(at.left, (at.right, at.right_col), epilogue.accumulate);
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
        self.for_tiles(precision, size, (left, right), scratch, |at| {
            let (place, epilogue) = ((at.row * cols + at.col, cols), epilogue.from(at.row, at.col, cols));
            let right = (at.right, at.right_col);
            // SAFETY: tiles do not overlap, and this task alone has this one.
            unsafe { rounded_tile(&out, place, at.size, right, at.left, &epilogue) };
        });
    }

    /// Packs the factors, and runs `task` for each tile of the result.
    fn for_tiles(
        &self,
        precision: Precision,
        size: Product,
        (left, right): (Matrix<'_>, Matrix<'_>),
        scratch: &mut [u32],
        task: impl Fn(TileTask<'_>) + Sync,
    ) {
        let Product { rows, cols, inner } = size;
        let micro = Micro::new(self.features, precision);
        assert!(right.covers(inner, cols), "{right:?} {size:?}");
        let (scratch, left_words) = scratch.split_at_mut(PackedRight::num_words(micro, size));
        let packed = packs_left(micro, size, left).then(|| self.pack_left(micro, size, left, left_words));
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
                let left = match &packed {
                    Some(packed) => LeftFactor::Packed(packed, row),
                    None => LeftFactor::InMemory(left.from(row, 0)),
                };
                task(TileTask { row, col: first_col + right_col, size, left, right: &panels, right_col });
            });
        }
    }

    fn pack_left<'a>(
        &self,
        micro: Micro,
        size: Product,
        left: Matrix<'_>,
        words: &'a mut [u32],
    ) -> PackedLeft<'a> {
        let by_rows = pack::by_rows(micro, left);
        let panels = PackedLeft { micro, size, by_rows, data: SharedSlice::new(words) };
        self.threads.run(size.rows.div_ceil(micro.rows), &|panel| {
            let row = panel * micro.rows;
            let lines = micro.rows.min(size.rows - row);
            for (block, (first, len)) in micro.inner_blocks(size.inner).enumerate() {
                let (first_term, num_terms) = micro.terms(first, len, size.inner);
                let (offset, words) = panels.place(row, (block, first, len));
                // SAFETY: panels do not overlap, and this task alone has this one.
                let out = unsafe { panels.data.range(offset, words) };
                let span = Span { inner: num_terms, lines, len };
                pack::pack_left_panel(micro, left.from(row, first_term), span, out);
            }
        });
        panels
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
    left: LeftFactor<'a>,
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

/// Whether a left factor is packed once for all tiles: if it cannot be read where it lies, and several tiles read the same
/// rows.
fn packs_left(micro: Micro, size: Product, left: Matrix<'_>) -> bool {
    size.cols > TILE_COLS && !pack::can_stay(micro, left, size.inner)
}

/// A left factor in panels: for each panel of rows, for each block of the inner dim, what the micro-kernel reads.
struct PackedLeft<'a> {
    micro: Micro,
    size: Product,
    by_rows: bool,
    data: SharedSlice<'a, u32>,
}

impl PackedLeft<'_> {
    fn num_words(micro: Micro, size: Product) -> usize {
        size.rows.div_ceil(micro.rows) * Self::panel_words(micro, size.inner)
    }

    fn panel_words(micro: Micro, inner: usize) -> usize {
        micro.inner_blocks(inner).map(|(_, len)| pack::left_words(micro, len)).sum()
    }

    /// Offset and length of the panel that begins at `row` in the `block`th block, the words `first..first + len`.
    fn place(&self, row: usize, (block, first, len): (usize, usize, usize)) -> (usize, usize) {
        let panel = row / self.micro.rows * Self::panel_words(self.micro, self.size.inner);
        (panel + first * self.micro.rows + block * pack::SLACK, pack::left_words(self.micro, len))
    }
}

/// Rows of a left factor from a tile's first on.
#[derive(Clone, Copy)]
enum LeftFactor<'a> {
    InMemory(Matrix<'a>),
    /// Packed, from this row on.
    Packed(&'a PackedLeft<'a>, usize),
}

impl PackedRight<'_> {
    /// Words of the widest group.
    fn num_words(micro: Micro, size: Product) -> usize {
        micro.padded_words(size.inner) * size.cols.min(GROUP_COLS).next_multiple_of(micro.cols)
    }

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
