use crate::device::Result;
use crate::tape::{BackwardContext, ForwardContext, Operation, declares};

/// `factor * x` for float values, in the shape and dtype of `x`.
#[derive(Debug, Clone, Copy)]
pub struct Scale(pub f32);

impl Operation for Scale {
    declares! { accepts_sharded_rows }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let mut y = cx.empty(cx.input(0).shape(), cx.input(0).dtype())?;
        let factor = self.0;
        cx.device().map(cx.input(0), y.view_mut(), 1, |x| factor * x);
        cx.output(y);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        let mut grad = cx.take_output_grad();
        let factor = self.0;
        cx.device().map_in_place(grad.view_mut(), 1, |dy| factor * dy);
        cx.add_grad(0, grad)
    }
}
