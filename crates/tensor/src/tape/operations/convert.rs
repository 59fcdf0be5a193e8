use crate::device::Result;
use crate::tape::{BackwardContext, ForwardContext, Operation, declares};

/// Converts float data to the tape's precision.
#[derive(Debug)]
pub struct Convert;

impl Operation for Convert {
    declares! { accepts_sharded_rows }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let dtype = cx.precision().dtype();
        let y = if cx.input(0).dtype() == dtype {
            cx.take_or_copy_input(0)?
        } else {
            let mut y = cx.empty(cx.input(0).shape(), dtype)?;
            cx.device().convert(cx.input(0), y.view_mut());
            y
        };
        cx.output(y);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        cx.pass_grad(0);
        Ok(())
    }
}
