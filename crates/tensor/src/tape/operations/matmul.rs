use crate::device::{Device, MatmulEpilogue, Result, Transposition};
use crate::precision::Precision;
use crate::shape::Shape;
use crate::tape::{BackwardContext, ForwardContext, Operation, declares};
use crate::tensor::Tensor;
use crate::view::View;

/// The matmul of two float values in the tape's precision: `left` (`[.., rows, inner]`) times `right`, which is either one matrix for all
/// (`[inner, cols]`) or one per matrix of `left` (`[.., inner, cols]`). The output is `[.., rows, cols]`. Sums are f32.
///
/// Panics if the sizes do not match. For a layer with a weight, [`Linear`](crate::tape::Linear) is faster.
#[derive(Debug)]
pub struct MatMul;

/// The sizes of a batched matmul.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    num_matrices: usize,
    rows: usize,
    inner: usize,
    cols: usize,
}

impl Sizes {
    fn new(left: Shape, right: Shape) -> Self {
        let last_two = |shape: Shape| match *shape.dims() {
            [.., rows, cols] => (rows, cols),
            _ => panic!("{shape:?} is no matrix"),
        };
        let ((rows, inner), (right_inner, cols)) = (last_two(left), last_two(right));
        assert_eq!(inner, right_inner, "{left:?} times {right:?}");
        if right.dims().len() == 2 {
            return Sizes { num_matrices: 1, rows: left.rows(), inner, cols };
        }
        let outer = |shape: Shape| shape.with_cols(1).with_dim(shape.dims().len() - 2, 1);
        assert_eq!(outer(left), outer(right), "{left:?} times {right:?}");
        Sizes { num_matrices: outer(left).num_elements(), rows, inner, cols }
    }
}

/// An operand of a batched matmul.
#[derive(Clone, Copy)]
struct Factor<'a> {
    values: View<'a>,
    /// The size of each matrix.
    size: [usize; 2],
    transpose: Transposition,
}

impl<'a> Factor<'a> {
    /// Returns a matrix with its transposition.
    fn matrix(self, index: usize) -> (View<'a>, Transposition) {
        let Factor { values, size, transpose } = self;
        (values.part(index * size[0] * size[1], size.into()), transpose)
    }
}

/// Computes `out = left right`, one matrix at a time.
fn multiply(
    device: &Device,
    precision: Precision,
    num_matrices: usize,
    left: Factor<'_>,
    right: Factor<'_>,
    out: &mut Tensor,
    out_size: [usize; 2],
) -> Result<()> {
    for index in 0..num_matrices {
        let out = out.view_mut().into_part(index * out_size[0] * out_size[1], out_size.into());
        let (left, right) = (left.matrix(index), right.matrix(index));
        device.matmul(precision, left, right, out, MatmulEpilogue::Overwrite)?;
    }
    Ok(())
}

impl Operation for MatMul {
    declares! { inputs: 2..=2, reads_inputs: INPUT_HALF }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let (left, right) = (cx.input(0), cx.input(1));
        let Sizes { num_matrices, rows, inner, cols } = Sizes::new(left.shape(), right.shape());
        let mut y = cx.empty(left.shape().with_cols(cols), cx.precision().dtype())?;
        multiply(
            cx.device(),
            cx.precision(),
            num_matrices,
            Factor { values: left, size: [rows, inner], transpose: Transposition::No },
            Factor { values: right, size: [inner, cols], transpose: Transposition::No },
            &mut y,
            [rows, cols],
        )?;
        cx.output(y);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        let Sizes { num_matrices, rows, inner, cols } = Sizes::new(cx.input_shape(0), cx.input_shape(1));
        if cx.requires_grad(0) {
            let mut grad = cx.empty(cx.input_shape(0), cx.input_dtype(0))?;
            multiply(
                cx.device(),
                cx.precision(),
                num_matrices,
                Factor { values: cx.grad(), size: [rows, cols], transpose: Transposition::No },
                Factor { values: cx.input(1), size: [inner, cols], transpose: Transposition::Yes },
                &mut grad,
                [rows, inner],
            )?;
            cx.add_grad(0, grad)?;
        }
        if cx.requires_grad(1) {
            let mut grad = cx.empty(cx.input_shape(1), cx.input_dtype(1))?;
            multiply(
                cx.device(),
                cx.precision(),
                num_matrices,
                Factor { values: cx.input(0), size: [rows, inner], transpose: Transposition::Yes },
                Factor { values: cx.grad(), size: [rows, cols], transpose: Transposition::No },
                &mut grad,
                [inner, cols],
            )?;
            cx.add_grad(1, grad)?;
        }
        Ok(())
    }
}
