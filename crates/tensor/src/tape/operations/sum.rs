use crate::device::Result;
use crate::tape::{BackwardContext, ForwardContext, Operation};

/// The sum over one dim of a float value; the dim becomes 1.
#[derive(Debug, Clone, Copy)]
pub struct Sum {
    /// The dim to sum.
    pub dim: usize,
}

/// The mean over one dim of a float value; the dim becomes 1.
#[derive(Debug, Clone, Copy)]
pub struct Mean {
    /// The dim to average.
    pub dim: usize,
}

/// Sums over `dim` and multiplies the sums by `factor(len)`, where `len` is the length of the dim.
fn forward(cx: &mut ForwardContext<'_>, dim: usize, factor: fn(usize) -> f32) -> Result<()> {
    let x = cx.input(0);
    let dims = x.shape().outer_dim_inner(dim);
    let mut y = cx.empty(x.shape().with_dim(dim, 1), x.dtype())?;
    cx.device().sum_dim(x, dims, factor(dims[1]), y.view_mut());
    cx.output(y);
    Ok(())
}

fn backward(cx: &mut BackwardContext<'_>, dim: usize, factor: fn(usize) -> f32) -> Result<()> {
    let shape = cx.input_shape(0);
    let dims = shape.outer_dim_inner(dim);
    let mut grad = cx.empty(shape, cx.grad().dtype())?;
    cx.device().broadcast_dim(cx.grad(), dims, factor(dims[1]), grad.view_mut());
    cx.add_grad(0, grad)
}

impl Operation for Sum {
    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        forward(cx, self.dim, |_| 1.0)
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        backward(cx, self.dim, |_| 1.0)
    }
}

impl Operation for Mean {
    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        forward(cx, self.dim, |size| 1.0 / size as f32)
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        backward(cx, self.dim, |size| 1.0 / size as f32)
    }
}
