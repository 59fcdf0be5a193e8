use super::{BackwardContext, ForwardContext, Operation, ReadBy};
use crate::device::DeviceError;
use crate::shape::Shape;

/// The same elements with other dims, at most four. One dim may be `None`: its size is what the others leave. Panics if the number of
/// elements differs. Copies them only if somebody else reads `x`.
#[derive(Debug, Clone)]
pub struct Reshape(pub Vec<Option<usize>>);

impl Reshape {
    fn shape(&self, x: Shape) -> Shape {
        let rest = x.num_elements().checked_div(self.0.iter().flatten().product()).unwrap_or(0);
        let mut dims = [0; 4];
        dims.iter_mut().zip(&self.0).for_each(|(to, dim)| *to = dim.unwrap_or(rest));
        Shape::new(&dims[..self.0.len()])
    }
}

impl Operation for Reshape {
    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<(), DeviceError> {
        let shape = self.shape(cx.input(0).shape());
        let y = match cx.take_input(0) {
            Some(x) => x,
            None => cx.copy_input(0)?,
        };
        cx.output(y.reshaped(shape));
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<(), DeviceError> {
        let grad = cx.take_output_grad().reshaped(cx.input_shape(0));
        cx.add_grad(0, grad)
    }

    fn reads_input(&self, _: usize) -> ReadBy {
        ReadBy::NEITHER
    }
}
