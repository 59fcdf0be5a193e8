//! Matrix products.
//!
//! Factors are read as 32-bit words: f32, or pairs of bf16 where the machine multiplies them; sums are f32. The right factor is
//! packed once, in panels as wide as the micro-kernel, and shared by all threads; the left one is read where it lies, or
//! packed a panel at a time if it is transposed or of another type. (Goto, van de Geijn: "Anatomy of high-performance
//! matrix multiplication", 2008.)
//!
//! Every element of a result is summed in one order: `inner` is cut into equal blocks of at most 256 words, by
//! `inner` alone, and within a block words are added one by one (by AMX, sixteen at a time). So the bits depend neither on threads nor on tiles, nor, in f32 on
//! machines with fused multiply-add, on the width of the registers. Nothing is allocated.

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
mod grouped;
mod kernel;
mod pack;
#[cfg(target_arch = "x86_64")]
mod pairs;
mod tile;
mod words;

use super::element::{Element, Floats, FloatsMut};
use super::{Cpu, SharedSlice};
use crate::precision::Precision;
pub use grouped::GroupLimit;
use kernel::Left;
pub(crate) use kernel::Micro;
use pack::Span;
use std::ops::Range;
pub(crate) use tile::Tile;
use tile::{TILE_COLS, TILE_ROWS, TileEpilogue, rounded_tile};

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
        let start = row * self.row_stride + col * self.col_stride;
        // A matrix without columns has rows, but no values.
        Matrix { values: self.values.from(start.min(self.values.len())), ..self }
    }

    /// The same elements with rows and columns exchanged.
    pub(crate) fn transposed(self) -> Self {
        Matrix { row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }

    fn covers(&self, rows: usize, cols: usize) -> bool {
        if rows == 0 || cols == 0 {
            return true;
        }
        let row = (rows - 1).checked_mul(self.row_stride);
        let col = (cols - 1).checked_mul(self.col_stride);
        let last = row.zip(col).and_then(|(row, col)| row.checked_add(col));
        last.is_some_and(|last| last < self.values.len())
    }
}

/// What the result is added to.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Epilogue<'a> {
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
        left + RightPanels::num_words(micro, size.inner, size.cols.min(GROUP_COLS))
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
        epilogue: Epilogue<'_>,
        scratch: &mut [u32],
    ) {
        let cols = size.cols;
        assert_eq!(Some(out.len()), size.rows.checked_mul(cols), "the result is {} x {cols}", size.rows);
        assert!(left.covers(size.rows, size.inner), "{left:?} {size:?}");
        match out {
            FloatsMut::F32(out) => {
                let out = SharedSlice::new(out);
                self.for_tiles(precision, size, (left, right), scratch, |at| {
                    // SAFETY: tiles do not overlap, and this task alone has this one.
                    let mut tile = unsafe { Tile::new(&out, at.row * cols + at.col, cols, at.size) };
                    let epilogue = epilogue.from(at.row, at.col, cols);
                    tile.multiply(at.left, at.right, epilogue.accumulate);
                    tile.finish(self.features, &epilogue);
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
        epilogue: Epilogue<'_>,
        scratch: &mut [u32],
    ) {
        let cols = size.cols;
        let out = SharedSlice::new(out);
        self.for_tiles(precision, size, (left, right), scratch, |at| {
            let (place, epilogue) = ((at.row * cols + at.col, cols), epilogue.from(at.row, at.col, cols));
            // SAFETY: tiles do not overlap, and this task alone has this one.
            unsafe { rounded_tile(&out, place, at.size, (at.left, at.right), &epilogue) };
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
        let group_words = RightPanels::num_words(micro, inner, cols.min(GROUP_COLS));
        let (scratch, left_words) = scratch.split_at_mut(group_words);
        let packed = packs_left(micro, size, left).then(|| self.pack_left(micro, size, left, left_words));
        for first_col in (0..cols).step_by(GROUP_COLS) {
            let group_cols = GROUP_COLS.min(cols - first_col);
            let panels = self.pack_right(micro, (inner, group_cols), right.from(0, first_col), scratch);
            let col_tiles = group_cols.div_ceil(TILE_COLS);
            let tile_rows = tile_rows(rows, micro.rows, col_tiles, self.threads.num_threads());
            self.threads.run(rows.div_ceil(tile_rows) * col_tiles, &|index| {
                let (row, right_col) = (index / col_tiles * tile_rows, index % col_tiles * TILE_COLS);
                let size = Product {
                    rows: tile_rows.min(rows - row),
                    cols: TILE_COLS.min(group_cols - right_col),
                    inner,
                };
                let left = match &packed {
                    Some(packed) => LeftFactor::Packed(packed, row),
                    None => LeftFactor::InMemory(left.from(row, 0)),
                };
                task(TileTask { row, col: first_col + right_col, size, left, right: panels.from(right_col) });
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
        let out = SharedSlice::new(&mut *words);
        self.threads.run(size.rows.div_ceil(micro.rows), &|panel| {
            let row = panel * micro.rows;
            let lines = micro.rows.min(size.rows - row);
            for (block, (first, len)) in micro.inner_blocks(size.inner).enumerate() {
                let (first_term, num_terms) = micro.terms(first, len, size.inner);
                let place = PackedLeft::place((micro, size.inner), row, (block, first, len));
                // SAFETY: panels do not overlap, and only this task accesses this one.
                let out = unsafe { out.range(place.start, place.len()) };
                let span = Span { inner: num_terms, lines, len };
                pack::pack_left_panel(micro, left.from(row, first_term), span, out);
            }
        });
        PackedLeft { micro, inner: size.inner, by_rows: pack::by_rows(micro, left), words }
    }

    fn pack_right<'a>(
        &self,
        micro: Micro,
        (inner, cols): (usize, usize),
        right: Matrix<'_>,
        words: &'a mut [u32],
    ) -> RightPanels<'a> {
        let out = SharedSlice::new(&mut *words);
        self.threads.run(cols.div_ceil(micro.cols), &|panel| {
            // SAFETY: this task alone has this panel.
            unsafe { pack_panel(micro, (inner, cols), right, panel * micro.cols, &out) };
        });
        RightPanels::new(micro, (inner, cols), words)
    }
}

/// Rows of a tile, such that threads end at about the same time: a few whole panels of a left factor, `TILE_ROWS` at most.
fn tile_rows(rows: usize, panel_rows: usize, col_tiles: usize, num_threads: usize) -> usize {
    let (num_panels, most) = (rows.div_ceil(panel_rows), TILE_ROWS / panel_rows);
    // What the busiest thread computes, in panels, if tasks are taken in turns; the last ones may be smaller.
    let longest = |tile: usize| {
        let (num_tasks, rest) = (num_panels.div_ceil(tile) * col_tiles, num_panels % tile);
        let only_small_ones_last = (1..=col_tiles).contains(&(num_tasks % num_threads)) && rest > 0;
        let rounds = num_tasks.div_ceil(num_threads);
        if only_small_ones_last { (rounds - 1) * tile + rest } else { rounds * tile }
    };
    // Smaller ones read the right factor more often: those of half the size count as 1/32 slower.
    let cost = |tile: usize| longest(tile) * (17 * most - tile);
    let tiles = (most.div_ceil(2)..=most).rev();
    tiles.min_by_key(|&tile| cost(tile)).expect("a tile has a panel") * panel_rows
}

/// Packs the panel of a right factor of `inner x cols` that begins at column `col`.
///
/// # Safety
/// No one else reaches the words of this panel.
unsafe fn pack_panel(
    micro: Micro,
    (inner, cols): (usize, usize),
    right: Matrix<'_>,
    col: usize,
    out: &SharedSlice<'_, u32>,
) {
    let lines = micro.cols.min(cols - col);
    for (first, len) in micro.inner_blocks(inner) {
        let (first_term, num_terms) = micro.terms(first, len, inner);
        let offset = panel_offset(micro, cols, (first, len), col);
        // SAFETY: panels do not overlap, and the caller has this one.
        let out = unsafe { out.range(offset, len * micro.cols) };
        pack::right_panel(micro, right.from(first_term, col), Span { inner: num_terms, lines, len }, out);
    }
}

/// Where a panel lies that begins at column `col`, of the words `first..first + len` of the inner dim.
fn panel_offset(micro: Micro, cols: usize, (first, len): (usize, usize), col: usize) -> usize {
    first * cols.next_multiple_of(micro.cols) + len * col
}

/// One tile of a result, and the panels it is made from.
struct TileTask<'a> {
    row: usize,
    col: usize,
    size: Product,
    left: LeftFactor<'a>,
    right: RightPanels<'a>,
}

/// A packed right factor: for each block of the inner dim, for each panel of columns, rows of the panel's width.
#[derive(Clone, Copy)]
pub(crate) struct RightPanels<'a> {
    micro: Micro,
    inner: usize,
    cols: usize,
    /// The column that a tile begins at.
    first_col: usize,
    words: &'a [u32],
}

impl<'a> RightPanels<'a> {
    /// Words that a packed factor of `inner x cols` takes.
    pub(crate) fn num_words(micro: Micro, inner: usize, cols: usize) -> usize {
        micro.padded_words(inner) * cols.next_multiple_of(micro.cols)
    }

    /// A factor of `inner x cols` that was packed into `words`.
    pub(crate) fn new(micro: Micro, (inner, cols): (usize, usize), words: &'a [u32]) -> Self {
        let words = &words[..Self::num_words(micro, inner, cols)];
        RightPanels { micro, inner, cols, first_col: 0, words }
    }

    /// Packs a factor of `inner x cols` on the calling thread.
    pub(crate) fn pack(
        micro: Micro,
        (inner, cols): (usize, usize),
        right: Matrix<'_>,
        words: &'a mut [u32],
    ) -> Self {
        assert!(right.covers(inner, cols), "{right:?} is smaller than {inner} x {cols}");
        let out = SharedSlice::new(&mut *words);
        for col in (0..cols).step_by(micro.cols) {
            // SAFETY: nothing else runs.
            unsafe { pack_panel(micro, (inner, cols), right, col, &out) };
        }
        Self::new(micro, (inner, cols), words)
    }

    /// The factor without its first columns, which are whole panels.
    pub(crate) fn from(self, col: usize) -> Self {
        assert!(col.is_multiple_of(self.micro.cols), "panels are not cut");
        RightPanels { first_col: self.first_col + col, ..self }
    }

    /// Words of the block of the inner dim that begins at word `first`.
    fn block_len(&self, first: usize) -> usize {
        let block = self.micro.inner_blocks(self.inner).find(|block| block.0 == first);
        block.expect("a product cuts its inner dim as its factors do").1
    }

    /// The first `len` words of the panel that begins at column `col`, of a block (its first word and length).
    fn panel(&self, block: (usize, usize), len: usize, col: usize) -> &'a [u32] {
        assert!(len <= block.1 && self.first_col + col < self.cols);
        let offset = panel_offset(self.micro, self.cols, block, self.first_col + col);
        &self.words[offset..offset + len * self.micro.cols]
    }
}

/// Whether a left factor is packed once for all tiles: if it cannot be read where it lies, and several tiles read the same
/// rows.
fn packs_left(micro: Micro, size: Product, left: Matrix<'_>) -> bool {
    size.cols > TILE_COLS && !pack::can_stay(micro, left, size.inner)
}

/// A left factor in panels: for each panel of rows, for each block of the inner dim, what the micro-kernel reads.
pub(crate) struct PackedLeft<'a> {
    micro: Micro,
    inner: usize,
    by_rows: bool,
    words: &'a [u32],
}

impl PackedLeft<'_> {
    fn num_words(micro: Micro, size: Product) -> usize {
        size.rows.div_ceil(micro.rows) * Self::panel_words(micro, size.inner)
    }

    fn panel_words(micro: Micro, inner: usize) -> usize {
        micro.inner_blocks(inner).map(|(_, len)| pack::left_words(micro, len)).sum()
    }

    /// Where the panel that begins at `row` lies: the part of the `block`th block, the words `first..first + len`.
    fn place(
        (micro, inner): (Micro, usize),
        row: usize,
        (block, first, len): (usize, usize, usize),
    ) -> Range<usize> {
        let start =
            row / micro.rows * Self::panel_words(micro, inner) + first * micro.rows + block * pack::SLACK;
        start..start + pack::left_words(micro, len)
    }

    /// The panel that begins at `row`, in a block.
    fn panel(&self, row: usize, block: (usize, usize, usize)) -> Left<'_> {
        let words = &self.words[Self::place((self.micro, self.inner), row, block)];
        pack::packed_left(self.micro, self.by_rows, block.2, words)
    }
}

/// Rows of a left factor from a tile's first on.
#[derive(Clone, Copy)]
pub(crate) enum LeftFactor<'a> {
    InMemory(Matrix<'a>),
    /// Packed, from this row on.
    Packed(&'a PackedLeft<'a>, usize),
}

impl<'a> Epilogue<'a> {
    /// The epilogue of the part of a result of width `cols` that begins at `(row, col)`.
    fn from(&self, row: usize, col: usize, cols: usize) -> TileEpilogue<'a> {
        match *self {
            Epilogue::Overwrite => TileEpilogue::default(),
            Epilogue::Accumulate => TileEpilogue { accumulate: true, ..TileEpilogue::default() },
            Epilogue::Add { bias, residual } => TileEpilogue {
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
