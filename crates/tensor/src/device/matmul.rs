//! Products of matrices on a device.

use super::{Device, DeviceError};
use crate::kernels::Place;
use crate::kernels::cpu::element::Floats;
use crate::kernels::cpu::matmul::{Epilogue, Matrix, Product};
use crate::precision::Precision;
use crate::tensor::{Tensor, View, ViewMut};
use trireme_base::{Cost, DType};

/// Whether a factor of a product is read transposed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transpose {
    /// As it lies in memory.
    No,
    /// Rows and columns exchanged.
    Yes,
}

/// What the result of a product is added to.
#[derive(Debug, Clone, Copy)]
pub enum MatmulEpilogue<'a> {
    /// Nothing: the result replaces the destination.
    Overwrite,
    /// The destination's values, which are f32.
    Accumulate,
    /// Optional vectors and matrices, in f32: a bias for each column, a residual of the result's shape.
    Add {
        /// One value a column.
        bias: Option<View<'a>>,
        /// Row-major, of the result's shape.
        residual: Option<View<'a>>,
    },
}

impl Device {
    /// `out = op(left) op(right) + epilogue` for matrices, with factors rounded to `precision` and sums in f32; `out` is
    /// `rows x cols`.
    ///
    /// Cost: `2 rows cols inner` floating-point operations.
    ///
    /// # Errors
    /// If there is no memory to pack the right factor.
    ///
    /// # Panics
    /// If the shapes do not fit, if a factor is not of floats, or if what is added to is not f32.
    pub fn matmul(
        &self,
        precision: Precision,
        left: (View<'_>, Transpose),
        right: (View<'_>, Transpose),
        out: ViewMut<'_>,
        epilogue: MatmulEpilogue<'_>,
    ) -> Result<(), DeviceError> {
        let ((rows, inner), (right_inner, cols)) = (sides(&left), sides(&right));
        assert_eq!(inner, right_inner, "{:?} times {:?}", left.0.shape(), right.0.shape());
        let size = Product { rows, cols, inner };
        let cost = Cost::products(&[2, out.shape().num_elements(), inner]);
        let cost = cost.reads(left.0.num_bytes() + right.0.num_bytes());
        let (cost, added) = match epilogue {
            MatmulEpilogue::Overwrite => (cost.writes(out.num_bytes()), None),
            MatmulEpilogue::Accumulate => (cost.updates(out.num_bytes()), None),
            MatmulEpilogue::Add { bias, residual } => {
                let cost = cost.reads(residual.map_or(0, |residual| residual.num_bytes()));
                let added = [bias, residual].map(|added| added.map(|added| added.place()));
                (cost.writes(out.num_bytes()), Some(added))
            }
        };
        let accumulates = matches!(epilogue, MatmulEpilogue::Accumulate);
        let mut scratch = self.product_scratch(precision, size, &left)?;
        let (left, right) = (factor(left), factor(right));
        let (mut out, mut scratch) = (out.into_place(), scratch.view_mut().into_place());
        self.issue("matmul", cost, move |cpu| {
            let epilogue = match &added {
                None if accumulates => Epilogue::Accumulate,
                None => Epilogue::Overwrite,
                Some(added) => {
                    let [bias, residual] =
                        added.each_ref().map(|added| added.as_ref().map(|added| added.f32s(cpu)));
                    Epilogue::Add { bias, residual }
                }
            };
            let matrix = |factor: &Factor| Matrix::row_major(factor.0.floats(cpu), factor.1, factor.2);
            let factors = (matrix(&left), matrix(&right));
            cpu.matmul(precision, size, factors, out.floats(cpu), epilogue, scratch.u32s(cpu));
        });
        Ok(())
    }

    /// Memory to pack the factors of a product.
    pub(super) fn product_scratch(
        &self,
        precision: Precision,
        size: Product,
        left: &(View<'_>, Transpose),
    ) -> Result<Tensor, DeviceError> {
        self.activation_of([self.product_scratch_words(precision, size, left)], DType::U32)
    }

    /// 32-bit words of that memory.
    pub(super) fn product_scratch_words(
        &self,
        precision: Precision,
        size: Product,
        (left, transpose): &(View<'_>, Transpose),
    ) -> usize {
        let elements = Floats::none(left.dtype());
        let left = Matrix::row_major(elements, left.shape().cols(), *transpose == Transpose::Yes);
        self.cpu.matmul_scratch(precision, size, left)
    }
}

/// Where a factor lies, the length of its rows, and whether it is read transposed.
type Factor = (Place, usize, bool);

fn factor((view, transpose): (View<'_>, Transpose)) -> Factor {
    (view.place(), view.shape().cols(), transpose == Transpose::Yes)
}

/// Rows and columns of a factor as a product reads it.
fn sides((view, transpose): &(View<'_>, Transpose)) -> (usize, usize) {
    let (rows, cols) = (view.shape().rows(), view.shape().cols());
    if *transpose == Transpose::Yes { (cols, rows) } else { (rows, cols) }
}
