//! Elementwise losses.

use crate::device::{Device, Expr, Result};
use crate::tape::{BackwardContext, ForwardContext, Operation, declares};
use crate::tensor::Tensor;
use crate::view::View;
use std::fmt;

/// A loss of an element `x` and its target.
pub trait ElementLoss: fmt::Debug + Send + Sync + 'static {
    /// Floating-point operations per value; a derivative takes about as many.
    const OPERATIONS: usize;

    /// Returns the loss.
    fn value<'f>(&self, x: Expr<'f>, target: Expr<'f>) -> Expr<'f>;

    /// Returns the derivative with respect to `x`.
    fn derivative<'f>(&self, x: Expr<'f>, target: Expr<'f>) -> Expr<'f>;
}

/// The mean of a loss over the elements of `x` and of targets of the same shape and dtype. It has no output: it adds to the tape's
/// [loss](crate::tape::Tape::loss), in which the value of a row is the mean over its elements. Targets have no gradient.
#[derive(Debug, Clone, Copy)]
pub struct MeanLoss<L>(pub L);

impl<L: ElementLoss> MeanLoss<L> {
    /// Computes the sum of each row.
    fn sums(&self, device: &Device, x: View<'_>, target: View<'_>) -> Result<Tensor> {
        let mut sums = device.activation([x.shape().rows()])?;
        device.zip_sum_rows(x, target, sums.view_mut(), L::OPERATIONS, |x, target| self.0.value(x, target));
        Ok(sums)
    }
}

impl<L: ElementLoss> Operation for MeanLoss<L> {
    declares! { inputs: 2..=2, reads_inputs: INPUT_HALF, accepts_sharded_positions }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        if cx.is_recording() {
            return Ok(());
        }
        let shape = cx.input(0).shape();
        let sums = self.sums(cx.device(), cx.input(0), cx.input(1))?;
        cx.add_sum_to_loss(sums.view(), shape.cols() as f64, shape.rows())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        let shape = cx.input_shape(0);
        let sums = self.sums(cx.device(), cx.input(0), cx.input(1))?;
        cx.add_sum_to_loss(sums.view(), shape.cols() as f64, shape.rows())?;
        drop(sums);
        let scale = cx.loss_grad_factor() / shape.num_elements() as f32;
        let mut grad = cx.empty(shape, cx.input(0).dtype())?;
        let (x, target) = (cx.input(0), cx.input(1));
        cx.device().zip(x, target, grad.view_mut(), L::OPERATIONS + 1, |x, target| {
            scale * self.0.derivative(x, target)
        });
        cx.add_grad(0, grad)
    }
}
