use crate::device::Result;
use crate::kernels::StridedBlocks;
use crate::tape::{BackwardContext, ForwardContext, Operation};
use std::ops::Range;

/// A range of one dim of `x`, of any shape and dtype. Panics if the range exceeds the dim.
#[derive(Debug, Clone)]
pub struct Slice {
    /// The dim to slice.
    pub dim: usize,
    /// The range of the dim.
    pub range: Range<usize>,
}

impl Operation for Slice {
    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let x = cx.input(0);
        let [outer, size, inner] = x.shape().outer_dim_inner(self.dim);
        assert!(self.range.end <= size, "{:?} of dim {} of {:?}", self.range, self.dim, x.shape());
        let mut y = cx.empty(x.shape().with_dim(self.dim, self.range.len()), x.dtype())?;
        let len = self.range.len() * inner;
        let from = StridedBlocks { offset: self.range.start * inner, stride: size * inner };
        cx.device().copy_blocks(x, from, y.view_mut(), StridedBlocks { offset: 0, stride: len }, outer, len);
        cx.output(y);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        let shape = cx.input_shape(0);
        let [outer, size, inner] = shape.outer_dim_inner(self.dim);
        let mut grad = cx.zeros(shape, cx.grad().dtype())?;
        let len = self.range.len() * inner;
        let to = StridedBlocks { offset: self.range.start * inner, stride: size * inner };
        let from = StridedBlocks { offset: 0, stride: len };
        cx.device().copy_blocks(cx.grad(), from, grad.view_mut(), to, outer, len);
        cx.add_grad(0, grad)
    }

    fn accepts_sharded_positions(&self) -> bool {
        self.dim != 1
    }
}
