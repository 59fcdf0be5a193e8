//! Packed matmul operands.

use super::kernel::{LeftPanel, MicroKernel};
use super::matrix::{MatmulSizes, Matrix};
use super::pack::{self, PanelSpan};
use crate::kernels::cpu::SharedSlice;
use std::ops::Range;

/// A packed right operand, ordered by block of the inner dim, then by panel of columns. A panel consists of rows of `micro.cols` words.
#[derive(Clone, Copy)]
pub(crate) struct RightPanels<'a> {
    pub(super) micro: MicroKernel,
    inner: usize,
    cols: usize,
    /// The first column of the operand that this value covers; set by [`columns_from`](RightPanels::columns_from).
    first_col: usize,
    words: &'a [u32],
}

impl<'a> RightPanels<'a> {
    /// Returns the words of a packed operand of `inner x cols`.
    pub(crate) fn num_words(micro: MicroKernel, inner: usize, cols: usize) -> usize {
        micro.padded_words(inner) * cols.next_multiple_of(micro.cols)
    }

    /// Wraps an operand of `inner x cols` that was packed into `words`.
    pub(crate) fn new(micro: MicroKernel, (inner, cols): (usize, usize), words: &'a [u32]) -> Self {
        let words = &words[..Self::num_words(micro, inner, cols)];
        RightPanels { micro, inner, cols, first_col: 0, words }
    }

    /// Packs an operand of `inner x cols` on the calling thread.
    pub(crate) fn pack(
        micro: MicroKernel,
        (inner, cols): (usize, usize),
        right: Matrix<'_>,
        words: &'a mut [u32],
    ) -> Self {
        assert!(right.covers(inner, cols), "{right:?} is smaller than {inner} x {cols}");
        let out = SharedSlice::new(&mut *words);
        for col in (0..cols).step_by(micro.cols) {
            // SAFETY: no other code accesses `out`.
            unsafe { pack_panel(micro, (inner, cols), right, col, &out) };
        }
        Self::new(micro, (inner, cols), words)
    }

    /// Returns the operand from column `col` on. `col` must be the start of a panel.
    pub(crate) fn columns_from(self, col: usize) -> Self {
        assert!(col.is_multiple_of(self.micro.cols), "panels are not cut");
        RightPanels { first_col: self.first_col + col, ..self }
    }

    /// Returns the number of words of the block of the inner dim that begins at word `first`.
    pub(super) fn block_len(&self, first: usize) -> usize {
        let block = self.micro.inner_blocks(self.inner).find(|block| block.0 == first);
        block.expect("a product cuts its inner dim as its factors do").1
    }

    /// Returns the first `len` rows of the panel that begins at column `col`, in a block given by its first word and length.
    pub(super) fn panel(&self, block: (usize, usize), len: usize, col: usize) -> &'a [u32] {
        assert!(len <= block.1 && self.first_col + col < self.cols);
        let offset = panel_offset(self.micro, self.cols, block, self.first_col + col);
        &self.words[offset..offset + len * self.micro.cols]
    }
}

/// A packed left operand, ordered by panel of rows, then by block of the inner dim.
pub(crate) struct PackedLeft<'a> {
    pub(super) micro: MicroKernel,
    pub(super) inner: usize,
    pub(super) by_rows: bool,
    pub(super) words: &'a [u32],
}

impl PackedLeft<'_> {
    pub(super) fn num_words(micro: MicroKernel, size: MatmulSizes) -> usize {
        size.rows.div_ceil(micro.rows) * Self::panel_words(micro, size.inner)
    }

    fn panel_words(micro: MicroKernel, inner: usize) -> usize {
        micro.inner_blocks(inner).map(|(_, len)| pack::num_left_words(micro, len)).sum()
    }

    /// Returns the range of the panel that begins at `row`, in block number `block`, which has the words `first..first + len`.
    pub(super) fn panel_range(
        micro: MicroKernel,
        inner: usize,
        row: usize,
        block: usize,
        first: usize,
        len: usize,
    ) -> Range<usize> {
        let start =
            row / micro.rows * Self::panel_words(micro, inner) + first * micro.rows + block * pack::SLACK;
        start..start + pack::num_left_words(micro, len)
    }

    /// Returns the panel that begins at `row`, in block number `block`, which has the words `first..first + len`.
    pub(super) fn panel(&self, row: usize, block: usize, first: usize, len: usize) -> LeftPanel<'_> {
        let words = &self.words[Self::panel_range(self.micro, self.inner, row, block, first, len)];
        pack::packed_left(self.micro, self.by_rows, len, words)
    }
}

/// The rows of a left operand from the first row of a tile on.
#[derive(Clone, Copy)]
pub(crate) enum LeftOperand<'a> {
    InMemory(Matrix<'a>),
    /// A packed operand, and the first row.
    Packed(&'a PackedLeft<'a>, usize),
}

/// Packs the panel that begins at column `col` of a right operand of `inner x cols`.
///
/// # Safety
/// No other code accesses the words of this panel.
pub(super) unsafe fn pack_panel(
    micro: MicroKernel,
    (inner, cols): (usize, usize),
    right: Matrix<'_>,
    col: usize,
    out: &SharedSlice<'_, u32>,
) {
    let lines = micro.cols.min(cols - col);
    for (first, len) in micro.inner_blocks(inner) {
        let (first_term, num_terms) = micro.terms(first, len, inner);
        let offset = panel_offset(micro, cols, (first, len), col);
        // SAFETY: panels do not overlap, and only the caller accesses this one.
        let out = unsafe { out.range(offset, len * micro.cols) };
        pack::right_panel(
            micro,
            right.submatrix(first_term, col),
            PanelSpan { inner: num_terms, lines, len },
            out,
        );
    }
}

/// Returns the offset of the panel that begins at column `col`, in the block of words `first..first + len` of the inner dim.
fn panel_offset(micro: MicroKernel, cols: usize, (first, len): (usize, usize), col: usize) -> usize {
    first * cols.next_multiple_of(micro.cols) + len * col
}
