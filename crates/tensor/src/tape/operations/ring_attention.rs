//! Ring attention: keys and values are passed around a ring of ranks (Liu, Zaharia, Abbeel: "Ring attention with blockwise transformers",
//! 2023). A rank holds the keys and values of two ranks at a time, and buffers of the same size, regardless of the number of ranks.
//!
//! Positions are assigned in zig-zag order, so that with a causal mask each rank computes about the same number of pairs in every step
//! (Brandon et al., "Striped attention", 2023, use another order for the same purpose).
//!
//! Cost for `degree` ranks: keys and values are sent `degree - 1` times in forward and in backward, and their gradients, in f32, `degree`
//! times.

use crate::cow_tensor::CowTensor;
use crate::device::{DeviceError, Result};
use crate::kernels::{
    AttentionInputs, AttentionOutput, AttentionRule, AttentionScope, AttentionShape, StridedBlocks,
};
use crate::tape::{AxisOps, OperationContext, PendingExchange, cast};
use crate::tensor::Tensor;
use crate::view::View;
use std::sync::Arc;
use trireme_base::{AxisRank, DType, ExchangeKind, Positions};

/// The attention of one rank of a ring.
pub(super) struct RingAttention {
    ops: Arc<dyn AxisOps>,
    shape: AttentionShape,
    rule: AttentionRule,
}

impl RingAttention {
    /// Returns the attention on the ring of the context axis; `None` if the ring has one rank.
    pub(super) fn of(cx: &OperationContext<'_>, shape: AttentionShape, rule: AttentionRule) -> Option<Self> {
        let ops = Arc::clone(cx.context_axis()?.ring.as_ref()?);
        Some(RingAttention { ops, shape, rule })
    }

    /// Returns the positions of the queries and of the keys present in a step. Step 0 has this rank's own keys.
    fn scope(&self, step: usize) -> AttentionScope {
        let AxisRank { rank, degree } = self.ops.axis_rank();
        let of = |rank, len| Positions::zig_zag(len * degree, AxisRank { rank, degree });
        AttentionScope {
            rule: self.rule,
            queries: of(rank, self.shape.seq_len),
            keys: of((rank + degree - step) % degree, self.shape.num_keys),
        }
    }

    fn degree(&self) -> usize {
        self.ops.axis_rank().degree
    }

    /// Returns the queries and this rank's keys and values as separate tensors.
    fn split_qkv<'a>(
        &self,
        cx: &OperationContext<'_>,
        views: &AttentionInputs<View<'a>>,
    ) -> Result<[CowTensor<'a>; 2]> {
        if let Some(keys_values) = views.keys_values {
            return Ok([CowTensor::Borrowed(views.queries), CowTensor::Borrowed(keys_values)]);
        }
        let [batch, len, q_cols, kv_cols] = self.sizes();
        let part = |first: usize, cols: usize| {
            let mut part = cx.empty([batch, len, cols], views.queries.dtype())?;
            let from = StridedBlocks { offset: first, stride: q_cols + kv_cols };
            let to = StridedBlocks { offset: 0, stride: cols };
            cx.device().copy_blocks(views.queries, from, part.view_mut(), to, batch * len, cols);
            Ok::<_, DeviceError>(CowTensor::Owned(part))
        };
        Ok([part(0, q_cols)?, part(q_cols, kv_cols)?])
    }

    /// Returns the number of sequences, queries per sequence on this rank, columns of queries, and columns of keys and values.
    fn sizes(&self) -> [usize; 4] {
        let AttentionShape { batch, seq_len, .. } = self.shape;
        [batch, seq_len, self.shape.query_cols(), self.shape.kv_cols()]
    }

    /// Starts to send keys and values to the next rank, unless this is the last step.
    fn send(
        &self,
        cx: &OperationContext<'_>,
        block: View<'_>,
        step: usize,
    ) -> Result<Option<PendingExchange>> {
        let shift = || self.ops.start(cx.device(), ExchangeKind::Shift, block);
        (step + 1 < self.degree()).then(shift).transpose()
    }

    /// Waits for the keys and values of the previous rank.
    fn receive(&self, cx: &OperationContext<'_>, shift: PendingExchange, block: View<'_>) -> Result<Tensor> {
        let mut next = cx.empty(block.shape(), block.dtype())?;
        self.ops.finish(cx.device(), shift, next.view_mut())?;
        Ok(next)
    }

    pub(super) fn forward(
        &self,
        cx: &OperationContext<'_>,
        views: AttentionInputs<View<'_>>,
        log_sums: &mut Tensor,
    ) -> Result<Tensor> {
        let (device, [batch, len, ..]) = (cx.device(), self.sizes());
        let [queries, mut block] = self.split_qkv(cx, &views)?;
        let mut sums = cx.zeros([batch, len, self.shape.output_cols()], DType::F32)?;
        device.map_in_place(log_sums.view_mut(), 0, |_| f32::NEG_INFINITY.into());
        for step in 0..self.degree() {
            let shift = self.send(cx, block.view(), step)?;
            let views = AttentionInputs { queries: queries.view(), keys_values: Some(block.view()), ..views };
            let scope = self.scope(step);
            if scope.num_pairs() > 0 {
                device.attention_block(views, self.shape, scope, sums.view_mut(), log_sums.view_mut())?;
            }
            if let Some(shift) = shift {
                block = CowTensor::Owned(self.receive(cx, shift, block.view())?);
            }
        }
        drop((queries, block));
        cast(device, sums, views.queries.dtype())
    }

    /// Computes the gradients of the queries and, if they are a separate input, of keys and values.
    pub(super) fn backward(
        &self,
        cx: &OperationContext<'_>,
        views: AttentionInputs<View<'_>>,
        output: AttentionOutput<View<'_>>,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let (device, dtype, [batch, len, q_cols, kv_cols]) =
            (cx.device(), views.queries.dtype(), self.sizes());
        let [queries, mut block] = self.split_qkv(cx, &views)?;
        let mut d_queries = cx.zeros([batch, len, q_cols], DType::F32)?;
        let mut d_block = cx.zeros(block.view().shape(), DType::F32)?;
        // The gradients of keys and values travel with them, and return to their rank in the last step.
        let mut d_shift = None;
        for step in 0..self.degree() {
            let shift = self.send(cx, block.view(), step)?;
            if let Some(d_shift) = d_shift.take() {
                self.ops.finish(device, d_shift, d_block.view_mut())?;
            }
            let views = AttentionInputs { queries: queries.view(), keys_values: Some(block.view()), ..views };
            let scope = self.scope(step);
            if scope.num_pairs() > 0 {
                let (d_queries, d_block) = (d_queries.view_mut(), d_block.view_mut());
                device.attention_block_backward(views, self.shape, scope, output, d_queries, d_block)?;
            }
            d_shift = Some(self.ops.start(device, ExchangeKind::Shift, d_block.view())?);
            if let Some(shift) = shift {
                block = CowTensor::Owned(self.receive(cx, shift, block.view())?);
            }
        }
        drop((queries, block));
        if let Some(d_shift) = d_shift {
            self.ops.finish(device, d_shift, d_block.view_mut())?;
        }
        let [d_queries, d_block] = [cast(device, d_queries, dtype)?, cast(device, d_block, dtype)?];
        if views.keys_values.is_some() {
            return Ok((d_queries, Some(d_block)));
        }
        let mut grad = cx.empty([batch, len, q_cols + kv_cols], dtype)?;
        for (part, offset, cols) in [(d_queries, 0, q_cols), (d_block, q_cols, kv_cols)] {
            let from = StridedBlocks { offset: 0, stride: cols };
            let to = StridedBlocks { offset, stride: q_cols + kv_cols };
            device.copy_blocks(part.view(), from, grad.view_mut(), to, batch * len, cols);
        }
        Ok((grad, None))
    }
}
