//! Losses of single elements.

use crate::device::{Device, Result};
use crate::tape::{BackwardContext, ForwardContext, Operation, OperationContext, ReadBy};
use crate::tensor::{Tensor, View};
use std::fmt;
use std::ops::RangeInclusive;
use trireme_base::DType;

/// A loss of an element `x` and its target. Kernels that run later have clones of it.
pub trait ElementLoss: fmt::Debug + Clone + Send + Sync + 'static {
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
    /// Adds the sum over the rows of their means.
    fn add_means(&self, cx: &mut OperationContext<'_>, sums: Tensor, cols: usize) -> Result<()> {
        let mut sum = cx.empty([1], DType::F64)?;
        cx.device().sum_elements(sums.view(), cols as f64, sum.view_mut());
        cx.add_loss(sum, sums.shape().num_elements())
    }

    /// The sum of each row.
    fn sums(&self, device: &Device, x: View<'_>, target: View<'_>) -> Result<Tensor> {
        let mut sums = device.activation([x.shape().rows()])?;
        let loss = self.0.clone();
        let value = move |x, target| loss.value(x, target);
        device.zip_sum_rows((x, target), sums.view_mut(), L::OPERATIONS, value);
        Ok(sums)
    }
}

impl<L: ElementLoss> Operation for MeanLoss<L> {
    fn num_inputs(&self) -> RangeInclusive<usize> {
        2..=2
    }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        if cx.is_recording() {
            return Ok(());
        }
        let cols = cx.input(0).shape().cols();
        let sums = self.sums(cx.device(), cx.input(0), cx.input(1))?;
        self.add_means(cx, sums, cols)
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        let shape = cx.input_shape(0);
        let sums = self.sums(cx.device(), cx.input(0), cx.input(1))?;
        self.add_means(cx, sums, shape.cols())?;
        let scale = cx.loss_scale() / shape.num_elements() as f32;
        let mut grad = cx.empty(shape, cx.input(0).dtype())?;
        let loss = self.0.clone();
        let derivative = move |x, target| scale * loss.derivative(x, target);
        cx.device().zip((cx.input(0), cx.input(1)), grad.view_mut(), L::OPERATIONS + 1, derivative);
        cx.add_grad(0, grad)
    }

    fn reads_input(&self, _: usize) -> ReadBy {
        ReadBy::INPUT_HALF
    }

    fn takes_positions(&self) -> bool {
        true
    }
}
