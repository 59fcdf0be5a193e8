use super::CompressionError;
use super::error::Result;
use std::ops::Range;

/// The layout of a flat f32 gradient: its length and the matrices in it. Elements outside the matrices are vectors and
/// gaps.
///
/// Only `powersgd` uses the matrices.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bucket {
    len: usize,
    matrices: Vec<Matrix>,
}

/// The position and shape of a row-major matrix in a bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Matrix {
    /// Index of the first element in the bucket.
    pub offset: usize,
    /// Number of rows.
    pub rows: usize,
    /// Number of columns.
    pub cols: usize,
}

impl Matrix {
    /// Returns the matrix's elements as indices into the bucket.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.rows * self.cols
    }
}

impl Bucket {
    /// Creates a bucket of `len` elements without known shapes. It is treated as one matrix that is as square as
    /// possible; trailing elements that do not fill a row are outside the matrix.
    pub fn flat(len: usize) -> Self {
        let rows = len.isqrt();
        let cols = len.checked_div(rows).unwrap_or(0);
        Bucket { len, matrices: vec![Matrix { offset: 0, rows, cols }] }
    }

    /// Creates a bucket of `len` elements that contains `matrices`. There may be gaps between them.
    ///
    /// # Errors
    /// [`CompressionError::Matrix`] if the matrices are not in ascending order, overlap, or end beyond `len`.
    pub fn with_matrices(len: usize, matrices: Vec<Matrix>) -> Result<Self> {
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

    /// Whether the bucket has no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The matrices, in ascending order of their offsets.
    pub fn matrices(&self) -> &[Matrix] {
        &self.matrices
    }
}
