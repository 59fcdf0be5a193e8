use crate::device::{Device, Result};
use crate::kernels::Bags;
use crate::shape::Shape;
use crate::tape::{BackwardContext, ForwardContext, Operation, ReadBy, declares};
use crate::tensor::Tensor;
use crate::view::View;
use trireme_base::{Category, DType};

/// Gathers rows of `x` (`[num_rows, cols]`, of any float dtype) by id (u32, at most three dims), as `[.., cols]`.
#[derive(Debug)]
pub struct GatherRows;

/// Sums the rows of `x` (`[.., cols]`) with equal ids (u32, one per row), as `[num_rows, cols]`; zeros for ids without rows.
#[derive(Debug, Clone, Copy)]
pub struct ScatterAddRows {
    /// Number of rows of the output.
    pub num_rows: usize,
}

fn gather(device: &Device, x: View<'_>, ids: View<'_>, shape: Shape) -> Result<Tensor> {
    let mut y = device.activation_of(shape, x.dtype())?;
    device.gather_rows(x, ids, y.view_mut());
    Ok(y)
}

/// Adds in f32, in the order of the rows, and rounds each sum once.
fn scatter_add(device: &Device, x: View<'_>, ids: View<'_>, num_rows: usize) -> Result<Tensor> {
    let shape = Shape::from([num_rows, x.shape().cols()]);
    let mut sums = device.zeros(shape, DType::F32, Category::Activations)?;
    let bags = Bags::of_single_ids(ids);
    if x.dtype() == DType::F32 {
        device.embedding_bag_backward(bags, x, sums.view_mut());
        return Ok(sums);
    }
    let mut converted = device.activation(x.shape())?;
    device.convert(x, converted.view_mut());
    device.embedding_bag_backward(bags, converted.view(), sums.view_mut());
    let mut rounded = device.activation_of(shape, x.dtype())?;
    device.convert(sums.view(), rounded.view_mut());
    Ok(rounded)
}

impl Operation for GatherRows {
    declares! { inputs: 2..=2 }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let ids = cx.input(1);
        let shape = ids.shape().append_dim(cx.input(0).shape().cols());
        let y = gather(cx.device(), cx.input(0), ids, shape)?;
        cx.output(y);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        let grad = scatter_add(cx.device(), cx.grad(), cx.input(1), cx.input_shape(0).rows())?;
        cx.add_grad(0, grad)
    }

    fn reads_input(&self, input: usize) -> ReadBy {
        if input == 1 { ReadBy::INPUT_HALF } else { ReadBy::NEITHER }
    }
}

impl Operation for ScatterAddRows {
    declares! { inputs: 2..=2 }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let y = scatter_add(cx.device(), cx.input(0), cx.input(1), self.num_rows)?;
        cx.output(y);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        let grad = gather(cx.device(), cx.grad(), cx.input(1), cx.input_shape(0))?;
        cx.add_grad(0, grad)
    }

    fn reads_input(&self, input: usize) -> ReadBy {
        if input == 1 { ReadBy::INPUT_HALF } else { ReadBy::NEITHER }
    }
}
