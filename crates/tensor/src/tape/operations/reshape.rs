use crate::device::Result;
use crate::shape::Shape;
use crate::tape::{BackwardContext, ForwardContext, Operation};

/// Changes the dims of `x`, to at most four. Panics if the number of elements differs. Copies the elements only if `x` has another reader.
#[derive(Debug, Clone)]
pub struct Reshape(pub Vec<NewDim>);

/// A dim of the output of [`Reshape`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NewDim {
    /// This length.
    Size(usize),
    /// The length of the dim of `x` at the same index.
    Same,
    /// The remaining length; at most one dim.
    Rest,
}

impl Reshape {
    fn shape(&self, x: Shape) -> Shape {
        let mut dims = [1; 4];
        for (place, (to, dim)) in dims.iter_mut().zip(&self.0).enumerate() {
            *to = match dim {
                NewDim::Size(size) => *size,
                NewDim::Same => x.dims()[place],
                NewDim::Rest => 1,
            };
        }
        if let Some(rest) = self.0.iter().position(|dim| *dim == NewDim::Rest) {
            dims[rest] = x.num_elements().checked_div(dims.iter().product()).unwrap_or(0);
        }
        Shape::new(&dims[..self.0.len()])
    }
}

impl Operation for Reshape {
    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let shape = self.shape(cx.input(0).shape());
        let y = cx.take_or_copy_input(0)?;
        cx.output(y.reshaped(shape));
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        let grad = cx.take_output_grad().reshaped(cx.input_shape(0));
        cx.add_grad(0, grad)
    }

    fn accepts_sharded_positions(&self) -> bool {
        self.0.starts_with(&[NewDim::Same; 2])
    }
}
