use crate::device::Result;
use crate::tape::{BackwardContext, ForwardContext, Operation, declares};

/// Softmax over the last dim of a float value, in the shape and dtype of `x`. A row whose elements are all negative infinity gives NaN.
#[derive(Debug)]
pub struct Softmax;

impl Operation for Softmax {
    declares! { reads_outputs: INPUT_HALF, accepts_sharded_rows }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let mut y = cx.empty(cx.input(0).shape(), cx.input(0).dtype())?;
        cx.device().softmax(cx.input(0), y.view_mut());
        cx.output(y);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        let mut grad = cx.take_output_grad();
        cx.device().softmax_backward(cx.output(0), grad.view_mut());
        cx.add_grad(0, grad)
    }
}
