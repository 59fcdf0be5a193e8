use crate::device::{Device, Result};
use crate::shape::Shape;
use crate::tape::{BackwardContext, ForwardContext, Operation};
use crate::view::{View, ViewMut};

/// Exchanges two dims of `x`, of any shape and dtype. Copies the elements.
#[derive(Debug, Clone, Copy)]
pub struct Transpose(pub usize, pub usize);

impl Transpose {
    fn shape(self, x: Shape) -> Shape {
        x.with_dim(self.0, x.dims()[self.1]).with_dim(self.1, x.dims()[self.0])
    }

    fn run(self, device: &Device, x: View<'_>, y: ViewMut<'_>) {
        let shape = x.shape();
        let num_dims = shape.dims().len();
        // Leading dims of size 1 fill up to four dims.
        let (mut strides, mut dims) = ([0; 4], [1; 4]);
        let first = dims.len() - num_dims;
        for dim in 0..num_dims {
            [_, dims[first + dim], strides[first + dim]] = shape.outer_dim_inner(dim);
        }
        strides.swap(first + self.0, first + self.1);
        dims.swap(first + self.0, first + self.1);
        device.permute(x, strides, y, dims);
    }
}

impl Operation for Transpose {
    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let mut y = cx.empty(self.shape(cx.input(0).shape()), cx.input(0).dtype())?;
        self.run(cx.device(), cx.input(0), y.view_mut());
        cx.output(y);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        let mut grad = cx.empty(cx.input_shape(0), cx.grad().dtype())?;
        self.run(cx.device(), cx.grad(), grad.view_mut());
        cx.add_grad(0, grad)
    }
}
