use crate::device::Result;
use crate::kernels::StridedBlocks;
use crate::tape::{BackwardContext, ForwardContext, Operation, declares};

/// Concatenates any number of values of one dtype along one dim. Panics if another dim differs.
#[derive(Debug, Clone, Copy)]
pub struct Concat {
    /// The dim to concatenate.
    pub dim: usize,
}

impl Operation for Concat {
    declares! { inputs: 1..=usize::MAX }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let shape = cx.input(0).shape();
        let size = (0..cx.num_inputs()).map(|index| cx.input(index).shape().dims()[self.dim]).sum();
        let mut y = cx.empty(shape.with_dim(self.dim, size), cx.input(0).dtype())?;
        let [outer, _, inner] = shape.outer_dim_inner(self.dim);
        let mut offset = 0;
        for index in 0..cx.num_inputs() {
            let x = cx.input(index);
            let len = x.shape().dims()[self.dim] * inner;
            let alike = shape.with_dim(self.dim, x.shape().dims()[self.dim]);
            assert_eq!(x.shape(), alike, "next to {shape:?}, along dim {}", self.dim);
            let (from, to) =
                (StridedBlocks { offset: 0, stride: len }, StridedBlocks { offset, stride: size * inner });
            cx.device().copy_blocks(x, from, y.view_mut(), to, outer, len);
            offset += len;
        }
        cx.output(y);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        let [outer, size, inner] = cx.grad().shape().outer_dim_inner(self.dim);
        let mut offset = 0;
        for index in 0..cx.num_inputs() {
            let shape = cx.input_shape(index);
            let len = shape.dims()[self.dim] * inner;
            if cx.requires_grad(index) {
                let mut grad = cx.empty(shape, cx.grad().dtype())?;
                let (from, to) = (
                    StridedBlocks { offset, stride: size * inner },
                    StridedBlocks { offset: 0, stride: len },
                );
                cx.device().copy_blocks(cx.grad(), from, grad.view_mut(), to, outer, len);
                cx.add_grad(index, grad)?;
            }
            offset += len;
        }
        Ok(())
    }

    fn accepts_sharded_positions(&self) -> bool {
        self.dim != 1
    }
}
