//! Matrices in memory, and sizes of products.

use crate::kernels::cpu::element::Floats;

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

    pub(super) fn covers(&self, rows: usize, cols: usize) -> bool {
        if rows == 0 || cols == 0 {
            return true;
        }
        let row = (rows - 1).checked_mul(self.row_stride);
        let col = (cols - 1).checked_mul(self.col_stride);
        let last = row.zip(col).and_then(|(row, col)| row.checked_add(col));
        last.is_some_and(|last| last < self.values.len())
    }
}

/// Sizes of a product: `rows x inner` times `inner x cols`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Product {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) inner: usize,
}
