//! Matmul kernels.

use super::{Device, Result};
use crate::fp8::{Fp8Scaling, Fp8View};
use crate::kernels::Operand;
use crate::kernels::call::MatmulCall;
use crate::kernels::cpu::element::Floats;
use crate::kernels::cpu::matmul::{MatmulSizes, Matrix, fp8_scratch_words};
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

/// An operand of a matmul.
#[derive(Debug, Clone, Copy)]
pub enum MatmulOperand<'a> {
    /// Values, which are rounded to the precision of the matmul.
    Values(View<'a>),
    /// fp8 codes with a scale in common.
    Fp8(Fp8View<'a>),
}

impl<'a> From<View<'a>> for MatmulOperand<'a> {
    fn from(values: View<'a>) -> Self {
        MatmulOperand::Values(values)
    }
}

impl<'a> MatmulOperand<'a> {
    /// Returns the values, or the codes.
    pub(crate) fn elements(&self) -> View<'a> {
        match self {
            MatmulOperand::Values(values) => *values,
            MatmulOperand::Fp8(quantized) => quantized.codes,
        }
    }

    fn scaling(&self) -> Option<Fp8Scaling<Operand>> {
        match self {
            MatmulOperand::Values(_) => None,
            MatmulOperand::Fp8(quantized) => Some(quantized.scaling.map(View::operand)),
        }
    }
}

impl Device {
    /// Computes `out = op(left) op(right) + epilogue` for matrices. Operands are rounded to `precision`; sums are f32. `out` is `rows x
    /// cols`. GPUs of compute capability 8.9 or later multiply fp8 operands by fp8 units if all sizes are multiples of 16 and all matrices
    /// are aligned to 16 bytes; otherwise the values of the codes are multiplied in bf16.
    ///
    /// Cost: `2 rows cols inner` floating-point operations.
    ///
    /// # Errors
    /// If there is no memory to pack operands.
    ///
    /// # Panics
    /// If the shapes do not match, if an operand is not a float type, or if an accumulated destination, bias or residual is not
    /// f32. Also if only one operand is fp8, or if both are and `precision` is not bf16.
    pub fn matmul<'a>(
        &self,
        precision: Precision,
        (left, left_transposition): (impl Into<MatmulOperand<'a>>, Transposition),
        (right, right_transposition): (impl Into<MatmulOperand<'a>>, Transposition),
        out: ViewMut<'_>,
        epilogue: MatmulEpilogue<'_>,
    ) -> Result<()> {
        let (left, right): (MatmulOperand<'_>, MatmulOperand<'_>) = (left.into(), right.into());
        let fp8 = match [&left, &right].map(MatmulOperand::scaling) {
            [Some(left), Some(right)] => Some([left, right]),
            [None, None] => None,
            _ => panic!("an fp8 operand and one that is not"),
        };
        assert!(fp8.is_none() || precision == Precision::Bf16, "fp8 operands in {precision}");
        let (left, right) = ((left.elements(), left_transposition), (right.elements(), right_transposition));
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
            fp8,
            transposed: [left.1, right.1].map(|transpose| transpose == Transposition::Yes),
            accumulate: matches!(epilogue, MatmulEpilogue::Accumulate),
        });
        Ok(())
    }

    /// Returns the 32-bit words of scratch memory for a matmul. The CPU packs operands in it, after the bf16 values of fp8 operands.
    pub(super) fn matmul_scratch_words(
        &self,
        precision: Precision,
        size: MatmulSizes,
        (left, transpose): &(View<'_>, Transposition),
    ) -> usize {
        if self.is_gpu {
            return matmul_scratch_words(precision, size);
        }
        // Only fp8 operands are u8.
        let is_fp8 = left.dtype() == DType::U8;
        let elements = Floats::empty(if is_fp8 { DType::Bf16 } else { left.dtype() });
        let left = Matrix::row_major(elements, left.shape().cols(), *transpose == Transposition::Yes);
        let MatmulSizes { rows, cols, inner } = size;
        let fp8_words = fp8_scratch_words(rows * inner) + fp8_scratch_words(inner * cols);
        self.cpu.matmul_scratch(precision, size, left) + if is_fp8 { fp8_words } else { 0 }
    }
}

/// Returns the rows and columns of `op(view)`.
fn sides((view, transpose): &(View<'_>, Transposition)) -> (usize, usize) {
    let (rows, cols) = (view.shape().rows(), view.shape().cols());
    if *transpose == Transposition::Yes { (cols, rows) } else { (rows, cols) }
}
