//! Matrices in memory, sizes of matmuls, and epilogues.

use crate::kernels::cpu::element::Floats;
use std::fmt;

/// A matrix in memory: element `(i, j)` is `values[i * row_stride + j * col_stride]`. One of the strides is 1.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Matrix<'a> {
    pub(crate) values: Floats<'a>,
    pub(crate) row_stride: usize,
    pub(crate) col_stride: usize,
}

impl<'a> Matrix<'a> {
    /// Creates a row-major matrix with rows of length `cols`, or its transpose.
    pub(crate) fn row_major(values: Floats<'a>, cols: usize, transposed: bool) -> Self {
        let (row_stride, col_stride) = if transposed { (1, cols) } else { (cols, 1) };
        Matrix { values, row_stride, col_stride }
    }

    /// Returns the submatrix from row `row` and column `col` on.
    pub(crate) fn submatrix(self, row: usize, col: usize) -> Self {
        let start = row * self.row_stride + col * self.col_stride;
        // A matrix without columns may have rows but has no values.
        Matrix { values: self.values.tail(start.min(self.values.len())), ..self }
    }

    /// Exchanges rows and columns.
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

/// Sizes of a matmul: `rows x inner` times `inner x cols`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MatmulSizes {
    /// Rows of the result.
    pub rows: usize,
    /// Columns of the result.
    pub cols: usize,
    /// Number of terms of each sum.
    pub inner: usize,
}

impl MatmulSizes {
    /// Returns the floating-point operations: a multiplication and an addition per term.
    pub fn operations(&self) -> f64 {
        2.0 * self.rows as f64 * self.cols as f64 * self.inner as f64
    }
}

impl fmt::Display for MatmulSizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MatmulSizes { rows, cols, inner } = self;
        f.pad(&format!("{rows}x{cols}x{inner}"))
    }
}

/// Values that are added to a product, or to a tile of a product.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Epilogue<'a> {
    /// Whether the product is added to the destination's values, which are f32; otherwise it replaces them.
    pub(crate) accumulate: bool,
    /// One value per column.
    pub(crate) bias: Option<&'a [f32]>,
    /// One value per element, from the first element of the result or tile on, with the row stride of the result.
    pub(crate) residual: Option<&'a [f32]>,
}

impl<'a> Epilogue<'a> {
    pub(crate) const OVERWRITE: Epilogue<'static> =
        Epilogue { accumulate: false, bias: None, residual: None };

    /// Returns the epilogue of the part that begins at `(row, col)` of a result of width `cols`.
    pub(super) fn for_tile(self, row: usize, col: usize, cols: usize) -> Self {
        let (bias, residual) = (self.bias.map(|bias| &bias[col..]), self.residual);
        Epilogue { bias, residual: residual.map(|residual| &residual[row * cols + col..]), ..self }
    }

    /// Returns bias and residual of `cols` elements of a row, where rows begin `stride` elements apart.
    pub(super) fn of_row(&self, row: usize, stride: usize, cols: usize) -> [Option<&'a [f32]>; 2] {
        let residual = self.residual.map(|residual| &residual[row * stride..][..cols]);
        [self.bias.map(|bias| &bias[..cols]), residual]
    }
}
