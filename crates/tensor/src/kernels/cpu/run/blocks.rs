use super::Cpu;
use crate::kernels::call::BlockCall;
use crate::kernels::cpu::element::{with_element, with_word};

impl Cpu {
    pub(super) fn run_block(&self, call: BlockCall) {
        match call {
            BlockCall::CopyBlocks { x, mut y, from, to, num_blocks, len } => with_word!(x.dtype() => |W| {
                self.copy_blocks::<W>(x.words(self), from, y.words(self), to, num_blocks, len);
            }),
            BlockCall::Permute { x, mut y, strides, dims } => with_word!(x.dtype() => |W| {
                self.permute::<W>(x.words(self), strides, y.words(self), dims);
            }),
            BlockCall::SumDim { x, mut y, dims, factor } => with_element!(x.dtype() => |T| {
                self.sum_dim::<T>(x.elements(self), dims, factor, y.elements(self));
            }),
            BlockCall::BroadcastDim { x, mut y, dims, factor } => with_element!(x.dtype() => |T| {
                self.broadcast_dim::<T>(x.elements(self), dims, factor, y.elements(self));
            }),
            BlockCall::GatherRows { x, ids, mut y } => {
                let cols = x.shape().cols();
                with_word!(x.dtype() => |W| {
                    self.gather_rows::<W>(x.words(self), ids.u32s(self), cols, y.words(self));
                });
            }
            BlockCall::Softmax { x, mut y } => {
                let cols = x.shape().cols();
                with_element!(x.dtype() => |T| self.softmax::<T>(x.elements(self), cols, y.elements(self)));
            }
            BlockCall::SoftmaxBackward { y, mut dy } => {
                let cols = y.shape().cols();
                with_element!(y.dtype() => |T| {
                    self.softmax_backward::<T>(y.elements(self), cols, dy.elements(self));
                });
            }
        }
    }
}
