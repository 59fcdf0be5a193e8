//! Approximate orthogonalization of matrices by matmuls (Newton–Schulz iteration; Jordan, "Muon", 2024).

use crate::kernels::cpu::Cpu;
use crate::kernels::cpu::element::{Floats, FloatsMut};
use crate::kernels::cpu::matmul::{Epilogue, MatmulSizes, Matrix};
use crate::precision::Precision;

/// Coefficients of an odd polynomial whose iteration moves singular values in (0, 1] close to 1, small ones quickly.
pub(crate) const QUINTIC: [f32; 3] = [3.4445, -4.7750, 2.0315];

/// Added to the norm of a matrix, which may be zero.
pub(crate) const NORM_EPSILON: f32 = 1e-7;

/// Scratch memory of the iteration, for a matrix whose shorter side is `m`.
pub(crate) struct OrthogonalizeScratch<'a> {
    /// `m x m`.
    pub(crate) gram: &'a mut [f32],
    /// `m x m`.
    pub(crate) polynomial: &'a mut [f32],
    /// The shape of the matrix.
    pub(crate) product: &'a mut [f32],
    /// Memory for packed operands.
    pub(crate) words: &'a mut [u32],
}

/// The sizes and operands of the three matmuls of an iteration. The Gram matrix is the smaller of the two: `X Xᵀ` for wide matrices, `Xᵀ X`
/// for tall ones.
pub(crate) struct NewtonSchulzMatmuls {
    rows: usize,
    cols: usize,
}

impl NewtonSchulzMatmuls {
    pub(crate) fn new([rows, cols]: [usize; 2]) -> Self {
        NewtonSchulzMatmuls { rows, cols }
    }

    pub(crate) fn is_tall(&self) -> bool {
        self.rows > self.cols
    }

    fn side(&self) -> usize {
        self.rows.min(self.cols)
    }

    pub(crate) fn sizes(&self) -> [MatmulSizes; 3] {
        [self.gram(), self.square(), self.product()]
    }

    fn gram(&self) -> MatmulSizes {
        MatmulSizes { rows: self.side(), cols: self.side(), inner: self.rows.max(self.cols) }
    }

    fn square(&self) -> MatmulSizes {
        MatmulSizes { rows: self.side(), cols: self.side(), inner: self.side() }
    }

    fn product(&self) -> MatmulSizes {
        MatmulSizes { rows: self.rows, cols: self.cols, inner: self.side() }
    }

    fn gram_operands<'a>(&self, x: Floats<'a>) -> (Matrix<'a>, Matrix<'a>) {
        let factor = |is_transposed| Matrix::row_major(x, self.cols, is_transposed);
        (factor(self.is_tall()), factor(!self.is_tall()))
    }

    fn product_operands<'a>(&self, x: Floats<'a>, polynomial: Floats<'a>) -> (Matrix<'a>, Matrix<'a>) {
        let x = Matrix::row_major(x, self.cols, false);
        let polynomial = Matrix::row_major(polynomial, self.side(), false);
        if self.is_tall() { (x, polynomial) } else { (polynomial, x) }
    }
}

impl Cpu {
    /// Returns the number of words of scratch memory in which [`Cpu::orthogonalize`] packs operands.
    pub(crate) fn orthogonalize_scratch(&self, precision: Precision, [rows, cols]: [usize; 2]) -> usize {
        let (matmuls, none) = (NewtonSchulzMatmuls::new([rows, cols]), Floats::F32(&[]));
        let square = Matrix::row_major(none, matmuls.side(), false);
        let num_words = |size, left| self.matmul_scratch(precision, size, left);
        let gram = num_words(matmuls.gram(), matmuls.gram_operands(none).0);
        let product = num_words(matmuls.product(), matmuls.product_operands(none, none).0);
        gram.max(num_words(matmuls.square(), square)).max(product)
    }

    pub(crate) fn orthogonalize(
        &self,
        matrix: &mut [f32],
        [rows, cols]: [usize; 2],
        num_steps: usize,
        precision: Precision,
        scratch: OrthogonalizeScratch<'_>,
    ) {
        let OrthogonalizeScratch { gram, polynomial, product, words } = scratch;
        let matmuls = NewtonSchulzMatmuls::new([rows, cols]);
        // Divides by the largest element first, so that squares do not overflow. If it is subnormal, its inverse may be infinite, so the
        // matrix becomes zero. The momentum of a matrix without gradients decays to such elements.
        let largest = matrix.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
        let inverse = if largest >= f32::MIN_POSITIVE { 1.0 / largest } else { 0.0 };
        self.scale(matrix, inverse);
        let norm = self.sum_of_squares(matrix).value().sqrt();
        self.scale(matrix, 1.0 / (norm as f32 + NORM_EPSILON));
        let [a, b, c] = QUINTIC;
        let mut multiply = |size, factors: (Matrix<'_>, Matrix<'_>), out: &mut [f32]| {
            self.matmul(precision, size, factors, FloatsMut::F32(out), Epilogue::OVERWRITE, words);
        };
        for _ in 0..num_steps {
            multiply(matmuls.gram(), matmuls.gram_operands(Floats::F32(matrix)), gram);
            let factor = Matrix::row_major(Floats::F32(gram), matmuls.side(), false);
            multiply(matmuls.square(), (factor, factor), polynomial);
            self.axpby(polynomial, c, gram, b);
            let factors = matmuls.product_operands(Floats::F32(matrix), Floats::F32(polynomial));
            multiply(matmuls.product(), factors, product);
            self.axpby(matrix, a, product, 1.0);
        }
    }
}
