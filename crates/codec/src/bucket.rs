use super::CompressionError;
use std::ops::Range;

/// A flat gradient, and the matrices in it. Elements outside of them are vectors and gaps.
///
/// Only low-rank compression asks for the matrices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bucket {
    len: usize,
    matrices: Vec<Matrix>,
}

/// Where a matrix lies in a bucket, row by row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Matrix {
    /// First element.
    pub offset: usize,
    /// Rows.
    pub rows: usize,
    /// Columns: elements of a row.
    pub cols: usize,
}

impl Matrix {
    /// Its elements within the bucket.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.rows * self.cols
    }
}

impl Bucket {
    /// `len` elements of no known shape, seen as one matrix, as square as can be. A last part that fills no row stays outside.
    pub fn flat(len: usize) -> Self {
        let rows = len.isqrt();
        let cols = len.checked_div(rows).unwrap_or(0);
        Bucket { len, matrices: vec![Matrix { offset: 0, rows, cols }] }
    }

    /// `len` elements with `matrices` in them, which may leave gaps.
    ///
    /// # Errors
    /// [`CompressionError::Matrix`] if they are not in ascending order, overlap, or end behind `len`.
    pub fn with_matrices(len: usize, matrices: Vec<Matrix>) -> Result<Self, CompressionError> {
        let mut end = 0;
        for &Matrix { offset, rows, cols } in &matrices {
            let matrix_end = rows.checked_mul(cols).and_then(|elements| offset.checked_add(elements));
            match matrix_end {
                Some(matrix_end) if end <= offset && matrix_end <= len => end = matrix_end,
                _ => return Err(CompressionError::Matrix { offset, rows, cols, len }),
            }
        }
        Ok(Bucket { len, matrices })
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The matrices, in order.
    pub fn matrices(&self) -> &[Matrix] {
        &self.matrices
    }
}
