//! Matrix products, through the `gemm` crate.
//!
//! `gemm` runs on one thread here: the product is cut into tiles whose size depends on the shape alone, and the
//! pool shares the tiles out. So the bits are the same for any number of threads; `gemm`'s own
//! threading would cut by the number of threads.

use super::{Cpu, SharedSlice};

/// Tiles of the result. Large enough that packing the operands again for each tile costs about 2 %,
/// small enough that eight threads find work in a 1024 x 1024 product.
const TILE_ROWS: usize = 256;
const TILE_COLS: usize = 512;

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

impl Cpu {
    /// `out = left right + epilogue`, `out` row-major and contiguous.
    ///
    /// Cost: `2 rows cols inner` floating-point operations.
    ///
    /// # Panics
    /// If an operand is too small for the sizes.
    pub(crate) fn matmul(
        &self,
        size: Product,
        left: Matrix<'_>,
        right: Matrix<'_>,
        out: &mut [f32],
        epilogue: MatmulEpilogue<'_>,
    ) {
        let Product { rows, cols, inner } = size;
        assert_eq!(out.len(), rows * cols, "the result is {rows} x {cols}");
        assert!(left.covers(rows, inner) && right.covers(inner, cols), "{left:?} {right:?} {size:?}");
        let (row_tiles, col_tiles) = (rows.div_ceil(TILE_ROWS), cols.div_ceil(TILE_COLS));
        let out = SharedSlice::new(out);
        self.threads.run(row_tiles * col_tiles, &|tile| {
            let (row, col) = (tile / col_tiles * TILE_ROWS, tile % col_tiles * TILE_COLS);
            let size = Product { rows: TILE_ROWS.min(rows - row), cols: TILE_COLS.min(cols - col), inner };
            // SAFETY: tiles do not overlap, and this task alone has this one.
            let tile = unsafe { Tile::new(&out, row * cols + col, cols, size) };
            let accumulate = tile.begin(epilogue, row, cols, col);
            tile.multiply(left.from(row, 0), right.from(0, col), accumulate);
        });
    }
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
        debug_assert!(row < self.size.rows);
        // SAFETY: rows of the tile lie in the result (checked in `new`) and belong to the tile's owner.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(row * self.row_stride), self.size.cols) }
    }

    /// Writes what the product is added to; tells whether there is anything.
    fn begin(&self, epilogue: MatmulEpilogue<'_>, first_row: usize, cols: usize, first_col: usize) -> bool {
        let MatmulEpilogue::Add { bias, residual } = epilogue else {
            return matches!(epilogue, MatmulEpilogue::Accumulate);
        };
        if bias.is_none() && residual.is_none() {
            return false;
        }
        for row in 0..self.size.rows {
            let out = self.row(row);
            match residual {
                Some(residual) => {
                    let start = (first_row + row) * cols + first_col;
                    out.copy_from_slice(&residual[start..start + self.size.cols]);
                }
                None => out.fill(0.0),
            }
            if let Some(bias) = bias {
                let bias = &bias[first_col..first_col + self.size.cols];
                out.iter_mut().zip(bias).for_each(|(out, &bias)| *out += bias);
            }
        }
        true
    }

    /// `tile = left right`, plus the tile where `accumulate` is set.
    pub(crate) fn multiply(&self, left: Matrix<'_>, right: Matrix<'_>, accumulate: bool) {
        let Product { rows, cols, inner } = self.size;
        assert!(left.covers(rows, inner) && right.covers(inner, cols), "operands cover the product");
        // SAFETY: the operands cover the product (checked above), the tile lies in its result (checked in
        // `new`), and it overlaps neither operand, for it is the only way to its elements.
        unsafe {
            gemm::gemm(
                rows,
                cols,
                inner,
                self.start,
                1,
                self.row_stride as isize,
                accumulate,
                left.data.as_ptr(),
                left.col_stride as isize,
                left.row_stride as isize,
                right.data.as_ptr(),
                right.col_stride as isize,
                right.row_stride as isize,
                1.0,
                1.0,
                false,
                false,
                false,
                gemm::Parallelism::None,
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::cpu::simd::CpuFeatures;
    use crate::kernels::cpu::threads::ThreadPool;
    use trireme_base::RandomKey;

    fn random(len: usize, name: &str) -> Vec<f32> {
        let mut values = vec![0.0; len];
        RandomKey::new(5, name).fill_normal(&mut values, 1.0);
        values
    }

    fn cpu(threads: usize) -> Cpu {
        Cpu { threads: ThreadPool::new(threads).unwrap(), features: CpuFeatures::detect() }
    }

    fn check(size: Product, left_transposed: bool, right_transposed: bool) {
        let Product { rows, cols, inner } = size;
        let (left, right) = (random(rows * inner, "left"), random(inner * cols, "right"));
        let (bias, residual) = (random(cols, "bias"), random(rows * cols, "residual"));
        let a = Matrix::row_major(&left, if left_transposed { rows } else { inner }, left_transposed);
        let b = Matrix::row_major(&right, if right_transposed { inner } else { cols }, right_transposed);
        let mut results = [1, 3].map(|threads| {
            let mut out = vec![f32::NAN; rows * cols];
            let epilogue = MatmulEpilogue::Add { bias: Some(&bias), residual: Some(&residual) };
            cpu(threads).matmul(size, a, b, &mut out, epilogue);
            out
        });
        assert_eq!(results[0], results[1], "bits depend on the number of threads");
        cpu(1).matmul(size, a, b, &mut results[1], MatmulEpilogue::Accumulate);
        for i in 0..rows {
            for j in 0..cols {
                let product: f64 = (0..inner)
                    .map(|k| {
                        f64::from(left[i * a.row_stride + k * a.col_stride])
                            * f64::from(right[k * b.row_stride + j * b.col_stride])
                    })
                    .sum();
                let added = f64::from(bias[j]) + f64::from(residual[i * cols + j]);
                let error = (f64::from(results[0][i * cols + j]) - product - added).abs();
                assert!(error < 1e-4, "{size:?} at {i},{j}: off by {error}");
                let error = (f64::from(results[1][i * cols + j]) - 2.0 * product - added).abs();
                assert!(error < 2e-4, "{size:?} accumulated at {i},{j}: off by {error}");
            }
        }
    }

    #[test]
    fn products_of_every_layout_and_odd_sizes() {
        for (rows, cols, inner) in [(1, 1, 1), (3, 5, 7), (33, 65, 20), (257, 17, 40), (70, 600, 9)] {
            for layout in 0..4 {
                check(Product { rows, cols, inner }, layout & 1 == 1, layout & 2 == 2);
            }
        }
    }

    #[test]
    fn an_empty_sum_leaves_the_epilogue() {
        let size = Product { rows: 2, cols: 3, inner: 0 };
        let mut out = [f32::NAN; 6];
        let empty = Matrix::row_major(&[], 0, false);
        cpu(1).matmul(size, empty, empty, &mut out, MatmulEpilogue::Overwrite);
        assert_eq!(out, [0.0; 6]);
    }
}
