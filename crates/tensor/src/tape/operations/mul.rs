use crate::device::Result;
use crate::tape::{BackwardContext, ForwardContext, Operation, declares};

/// `left * right` elementwise for float values of one shape and dtype, which the result has, too.
#[derive(Debug)]
pub struct Mul;

impl Operation for Mul {
    declares! { inputs: 2..=2, reads_inputs: INPUT_HALF, accepts_sharded_rows }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let mut y = cx.empty(cx.input(0).shape(), cx.input(0).dtype())?;
        cx.device().zip(cx.input(0), cx.input(1), y.view_mut(), 1, |left, right| left * right);
        cx.output(y);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        if cx.requires_grad(0) {
            let mut grad = cx.empty(cx.grad().shape(), cx.grad().dtype())?;
            cx.device().zip(cx.grad(), cx.input(1), grad.view_mut(), 1, |dy, right| dy * right);
            cx.add_grad(0, grad)?;
        }
        if cx.requires_grad(1) {
            let mut grad = cx.take_output_grad();
            cx.device().zip_in_place(grad.view_mut(), cx.input(0), 1, |dy, left| dy * left);
            cx.add_grad(1, grad)?;
        }
        Ok(())
    }
}
