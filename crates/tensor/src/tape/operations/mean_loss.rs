//! Losses of single elements.

use crate::device::{Device, DeviceError};
use crate::tape::{BackwardContext, ForwardContext, Operation};
use crate::tensor::View;
use std::fmt;
use std::ops::RangeInclusive;

/// A loss of an element `x` and its target.
pub trait ElementLoss: fmt::Debug + Send + Sync {
    /// Floating-point operations of a value; a derivative takes about as many.
    const OPERATIONS: usize;

    /// The loss.
    fn value(&self, x: f32, target: f32) -> f32;

    /// The derivative with respect to `x`.
    fn derivative(&self, x: f32, target: f32) -> f32;
}

/// The mean of a loss over the elements of `x` and of targets of the same shape and type. It has no output: it adds to the
/// tape's [loss](crate::tape::Tape::loss), a row the mean over its elements. Targets have no gradient.
#[derive(Debug, Clone, Copy)]
pub struct MeanLoss<L>(pub L);

impl<L: ElementLoss> MeanLoss<L> {
    /// The sum over the rows of their means.
    fn sum_of_means(&self, device: &Device, x: View<'_>, target: View<'_>) -> Result<f64, DeviceError> {
        let mut sums = device.activation([x.shape().rows()])?;
        let value = |x, target| self.0.value(x, target);
        device.zip_sum_rows((x, target), sums.view_mut(), L::OPERATIONS, value);
        let sum: f64 = sums.view().f32s().iter().map(|&sum| f64::from(sum)).sum();
        Ok(sum / x.shape().cols() as f64)
    }
}

impl<L: ElementLoss> Operation for MeanLoss<L> {
    fn num_inputs(&self) -> RangeInclusive<usize> {
        2..=2
    }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<(), DeviceError> {
        if cx.is_recording() {
            return Ok(());
        }
        let rows = cx.input(0).shape().rows();
        let loss = self.sum_of_means(cx.device(), cx.input(0), cx.input(1))?;
        cx.add_loss(loss, rows);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<(), DeviceError> {
        let shape = cx.input_shape(0);
        let loss = self.sum_of_means(cx.device(), cx.input(0), cx.input(1))?;
        cx.add_loss(loss, shape.rows());
        let scale = cx.loss_scale() / shape.num_elements() as f32;
        let mut grad = cx.empty(shape, cx.input(0).dtype())?;
        let derivative = |x, target| scale * self.0.derivative(x, target);
        cx.device().zip((cx.input(0), cx.input(1)), grad.view_mut(), L::OPERATIONS + 1, derivative);
        cx.add_grad(0, grad)
    }
}
