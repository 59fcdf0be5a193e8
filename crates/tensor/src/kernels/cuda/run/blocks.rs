use super::super::Cuda;
use super::super::launch::word;
use crate::kernels::call::BlockCall;
use crate::shape::Shape;

impl Cuda {
    pub(super) fn run_block(&self, call: &BlockCall) {
        match call {
            BlockCall::CopyBlocks { x, y, from, to, num_blocks, len } => {
                assert!(
                    *num_blocks <= 1 || to.stride >= *len,
                    "blocks of {len} at a distance of {}",
                    to.stride
                );
                let end = |blocks: &crate::kernels::StridedBlocks| match num_blocks {
                    0 => 0,
                    num => blocks.offset + (num - 1) * blocks.stride + len,
                };
                assert!(end(from) <= x.shape().num_elements() && end(to) <= y.shape().num_elements());
                let launch =
                    self.kernel("copy_blocks", &[word(x.dtype())]).arg(x).arg(from.offset).arg(from.stride);
                let launch = launch.arg(y).arg(to.offset).arg(to.stride).arg(len);
                launch.over_elements(Shape::from([*num_blocks, *len]));
            }
            BlockCall::Permute { x, y, strides, dims } => {
                let launch = self.kernel("permute", &[word(x.dtype())]);
                launch.arg(x).arg(strides).arg(y).arg(dims).over_elements(y.shape());
            }
            BlockCall::SumDim { x, y, dims: [outer, dim, 1], factor } => {
                let launch = self.kernel("sum_last_dim", &[x.dtype()]);
                launch.arg(x).arg(dim).arg(factor).arg(y).over_rows(*outer);
            }
            BlockCall::SumDim { x, y, dims: [_, dim, inner], factor } => {
                let launch = self.kernel("sum_dim", &[x.dtype()]);
                launch.arg(x).arg(dim).arg(inner).arg(factor).arg(y).over_elements(y.shape());
            }
            BlockCall::BroadcastDim { x, y, dims: [_, dim, inner], factor } => {
                let launch = self.kernel("broadcast_dim", &[x.dtype()]);
                launch.arg(x).arg(dim).arg(inner).arg(factor).arg(y).over_elements(y.shape());
            }
            BlockCall::GatherRows { x, ids, y } => {
                let launch = self.kernel("gather_rows", &[word(x.dtype())]).arg(x).arg(x.shape().rows());
                launch.arg(ids).arg(y).arg(x.shape().cols()).over_elements(y.shape());
            }
            BlockCall::Softmax { x, y } => {
                let launch = self.kernel("softmax", &[x.dtype()]);
                launch.arg(x).arg(y).arg(x.shape().cols()).over_rows(x.shape().rows());
            }
            BlockCall::SoftmaxBackward { y, dy } => {
                let launch = self.kernel("softmax_backward", &[y.dtype()]);
                launch.arg(y).arg(dy).arg(y.shape().cols()).over_rows(y.shape().rows());
            }
        }
    }
}
