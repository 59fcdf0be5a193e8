use crate::device::{DeviceError, Result};
use crate::kernels::StridedBlocks;
use crate::tape::{AxisOps, BackwardContext, ForwardContext, Operation, OperationContext, declares};
use crate::tensor::Tensor;
use crate::view::View;
use std::sync::Arc;
use trireme_base::{AxisRank, ExchangeKind};

/// Exchanges all heads of this rank's positions, `[batch, positions, cols]`, for all positions of its heads, or back, by an all-to-all
/// (Jacobs et al., "DeepSpeed Ulysses", 2023, section 3.2). The last dim consists of groups of heads, such as queries, keys and values. A
/// rank gets an equal share of each group.
///
/// Cost: one all-to-all of the value and one of its gradient; `(degree - 1) / degree` of the value is sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExchangeHeads {
    /// The groups of heads, over all ranks.
    pub groups: Vec<HeadGroup>,
    /// Whether the input has all heads and the output all positions; otherwise the reverse.
    pub to_heads: bool,
}

/// Heads that are adjacent in a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HeadGroup {
    /// Number of heads.
    pub num_heads: usize,
    /// Elements per head.
    pub head_dim: usize,
}

impl ExchangeHeads {
    fn exchange(&self, cx: &OperationContext<'_>, x: View<'_>, to_heads: bool) -> Result<Tensor> {
        let heads = cx.context_axis().and_then(|axis| axis.heads.as_ref());
        let heads = heads.expect("only several ranks exchange heads");
        let degree = heads.axis_rank().degree;
        let mut nums = self.groups.iter().map(|group| group.num_heads);
        if let Some(num_heads) = nums.find(|num_heads| !num_heads.is_multiple_of(degree)) {
            return Err(DeviceError::IndivisibleHeads { num_heads, degree });
        }
        if to_heads { self.to_heads(cx, heads, x) } else { self.to_positions(cx, heads, x) }
    }

    fn to_heads(&self, cx: &OperationContext<'_>, heads: &Arc<dyn AxisOps>, x: View<'_>) -> Result<Tensor> {
        let (device, AxisRank { degree, .. }) = (cx.device(), heads.axis_rank());
        let &[batch, len, cols] = x.shape().dims() else {
            panic!("{:?} is not [batch, len, cols]", x.shape())
        };
        let own_cols = cols / degree;
        let mut parts = cx.empty([degree, batch * len, own_cols], x.dtype())?;
        for (from, to, width) in self.columns(degree, [batch * len, own_cols]) {
            let (from, to) = (
                StridedBlocks { offset: from, stride: cols },
                StridedBlocks { offset: to, stride: own_cols },
            );
            device.copy_blocks(x, from, parts.view_mut(), to, batch * len, width);
        }
        let mut received = cx.empty([batch, degree * len, own_cols], x.dtype())?;
        heads.exchange(device, ExchangeKind::AllToAll, parts.view(), received.view_mut())?;
        if batch == 1 {
            return Ok(received);
        }
        // The received parts are ordered by rank, then by sequence; the output is ordered by sequence.
        drop(parts);
        let mut all = cx.empty(received.shape(), x.dtype())?;
        for (from, to) in position_blocks(degree, len * own_cols, batch) {
            device.copy_blocks(received.view(), from, all.view_mut(), to, batch, len * own_cols);
        }
        Ok(all)
    }

    fn to_positions(
        &self,
        cx: &OperationContext<'_>,
        heads: &Arc<dyn AxisOps>,
        x: View<'_>,
    ) -> Result<Tensor> {
        let (device, AxisRank { degree, .. }) = (cx.device(), heads.axis_rank());
        let &[batch, all_len, own_cols] = x.shape().dims() else {
            panic!("{:?} is not [batch, len, cols]", x.shape())
        };
        let (len, cols) = (all_len / degree, own_cols * degree);
        let mut received = cx.empty([degree, batch * len, own_cols], x.dtype())?;
        if batch == 1 {
            heads.exchange(device, ExchangeKind::AllToAll, x, received.view_mut())?;
        } else {
            let mut parts = cx.empty(received.shape(), x.dtype())?;
            for (to, from) in position_blocks(degree, len * own_cols, batch) {
                device.copy_blocks(x, from, parts.view_mut(), to, batch, len * own_cols);
            }
            heads.exchange(device, ExchangeKind::AllToAll, parts.view(), received.view_mut())?;
        }
        let mut all = cx.empty([batch, len, cols], x.dtype())?;
        for (to, from, width) in self.columns(degree, [batch * len, own_cols]) {
            let (from, to) = (
                StridedBlocks { offset: from, stride: own_cols },
                StridedBlocks { offset: to, stride: cols },
            );
            device.copy_blocks(received.view(), from, all.view_mut(), to, batch * len, width);
        }
        Ok(all)
    }

    /// Returns, for each rank and group, the first column in rows of all heads, the first element in the rank's part of shape `[rows,
    /// own_cols]`, and the number of columns.
    fn columns(
        &self,
        degree: usize,
        [rows, own_cols]: [usize; 2],
    ) -> impl Iterator<Item = (usize, usize, usize)> {
        let mut end = 0;
        self.groups.iter().flat_map(move |&HeadGroup { num_heads, head_dim }| {
            let (first, width) = (end, num_heads / degree * head_dim);
            end += num_heads * head_dim;
            (0..degree)
                .map(move |rank| (first + rank * width, rank * rows * own_cols + first / degree, width))
        })
    }
}

/// Returns, for each rank, where its positions are stored: in the concatenation of the ranks' parts, and in the value of all positions. A
/// block has the `len` elements of one sequence.
fn position_blocks(
    degree: usize,
    len: usize,
    batch: usize,
) -> impl Iterator<Item = (StridedBlocks, StridedBlocks)> {
    let part = move |rank| StridedBlocks { offset: rank * batch * len, stride: len };
    let all = move |rank| StridedBlocks { offset: rank * len, stride: degree * len };
    (0..degree).map(move |rank| (part(rank), all(rank)))
}

impl Operation for ExchangeHeads {
    declares! { accepts_sharded_positions }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let exchanged = self.exchange(cx, cx.input(0), self.to_heads)?;
        cx.output(exchanged);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        let grad = self.exchange(cx, cx.grad(), !self.to_heads)?;
        cx.add_grad(0, grad)
    }
}
