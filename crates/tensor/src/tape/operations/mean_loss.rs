//! Elementwise losses.

use crate::device::{Device, Result};
use crate::tape::{BackwardContext, ForwardContext, Operation, declares};
use crate::tensor::Tensor;
use crate::view::View;
use std::fmt;

/// A loss of an element `x` and its target. Cloned into kernels, which may run later.
pub trait ElementLoss: fmt::Debug + Clone + Send + Sync + 'static {
    /// Floating-point operations per value; a derivative takes about as many.
    const OPERATIONS: usize;

    /// Returns the loss.
    fn value(&self, x: f32, target: f32) -> f32;

    /// Returns the derivative with respect to `x`.
    fn derivative(&self, x: f32, target: f32) -> f32;
}

/// The mean of a loss over the elements of `x` and of targets of the same shape and dtype. It has no output: it adds to the tape's
/// [loss](crate::tape::Tape::loss), in which the value of a row is the mean over its elements. Targets have no gradient.
#[derive(Debug, Clone, Copy)]
pub struct MeanLoss<L>(pub L);

impl<L: ElementLoss> MeanLoss<L> {
    /// Computes the sum of each row.
    fn sums(&self, device: &Device, x: View<'_>, target: View<'_>) -> Result<Tensor> {
        let mut sums = device.activation([x.shape().rows()])?;
        let loss = self.0.clone();
        let value = move |x, target| loss.value(x, target);
        device.zip_sum_rows(x, target, sums.view_mut(), L::OPERATIONS, value);
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
        let loss = self.0.clone();
        let derivative = move |x, target| scale * loss.derivative(x, target);
        cx.device().zip(cx.input(0), cx.input(1), grad.view_mut(), L::OPERATIONS + 1, derivative);
        cx.add_grad(0, grad)
    }
}
