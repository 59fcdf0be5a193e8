//! Matmul kernels.

use super::{Device, Result};
use crate::kernels::call::MatmulCall;
use crate::kernels::cpu::element::Floats;
use crate::kernels::cpu::matmul::{MatmulSizes, Matrix};
use crate::kernels::cuda::matmul_scratch_words;
use crate::precision::Precision;
use crate::view::{View, ViewMut};
use trireme_base::DType;

/// The transposition of a matmul operand.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transposition {
    /// As stored.
    No,
    /// Rows and columns exchanged.
    Yes,
}

/// An addition to the result of a matmul.
#[derive(Debug, Clone, Copy)]
pub enum MatmulEpilogue<'a> {
    /// No addition: the result replaces the destination.
    Overwrite,
    /// Adds the result to the destination's values, which are f32.
    Accumulate,
    /// Adds an f32 bias and an f32 residual, both optional, to the result. Without a residual, GPUs round the bias to the dtype of the
    /// result before they add it.
    Add {
        /// One value per column.
        bias: Option<View<'a>>,
        /// Row-major, with the shape of the result.
        residual: Option<View<'a>>,
    },
}

impl Device {
    /// Computes `out = op(left) op(right) + epilogue` for matrices. Operands are rounded to `precision`; sums are f32. `out` is `rows x
    /// cols`.
    ///
    /// Cost: `2 rows cols inner` floating-point operations.
    ///
    /// # Errors
    /// If there is no memory to pack operands.
    ///
    /// # Panics
    /// If the shapes do not match, if an operand is not a float type, or if an accumulated destination, bias or residual is not f32.
    pub fn matmul(
        &self,
        precision: Precision,
        left: (View<'_>, Transposition),
        right: (View<'_>, Transposition),
        out: ViewMut<'_>,
        epilogue: MatmulEpilogue<'_>,
    ) -> Result<()> {
        let ((rows, inner), (right_inner, cols)) = (sides(&left), sides(&right));
        assert_eq!(inner, right_inner, "{:?} times {:?}", left.0.shape(), right.0.shape());
        assert_eq!([out.shape().rows(), out.shape().cols()], [rows, cols], "a product of {rows} x {cols}");
        let sizes = MatmulSizes { rows, cols, inner };
        let num_words = self.matmul_scratch_words(precision, sizes, &left);
        let mut scratch = self.activation_of([num_words], DType::U32)?;
        let [bias, residual] = match epilogue {
            MatmulEpilogue::Add { bias, residual } => [bias, residual],
            MatmulEpilogue::Overwrite | MatmulEpilogue::Accumulate => [None; 2],
        };
        self.issue(MatmulCall::Matmul {
            left: left.0.operand(),
            right: right.0.operand(),
            bias: bias.map(View::operand),
            residual: residual.map(View::operand),
            out: out.into_operand(),
            scratch: scratch.view_mut().into_operand(),
            precision,
            transposed: [left.1, right.1].map(|transpose| transpose == Transposition::Yes),
            accumulate: matches!(epilogue, MatmulEpilogue::Accumulate),
        });
        Ok(())
    }

    /// Returns the 32-bit words of scratch memory for a matmul. The CPU packs operands in it.
    pub(super) fn matmul_scratch_words(
        &self,
        precision: Precision,
        size: MatmulSizes,
        (left, transpose): &(View<'_>, Transposition),
    ) -> usize {
        if self.is_gpu {
            return matmul_scratch_words(precision, size);
        }
        let elements = Floats::empty(left.dtype());
        let left = Matrix::row_major(elements, left.shape().cols(), *transpose == Transposition::Yes);
        self.cpu.matmul_scratch(precision, size, left)
    }
}

/// Returns the rows and columns of `op(view)`.
fn sides((view, transpose): &(View<'_>, Transposition)) -> (usize, usize) {
    let (rows, cols) = (view.shape().rows(), view.shape().cols());
    if *transpose == Transposition::Yes { (cols, rows) } else { (rows, cols) }
}
