//! Attention to the keys of all ranks of a ring, which pass by one rank after the other (Liu, Zaharia, Abbeel: "Ring attention with blockwise
//! transformers", 2023). A rank has those of two ranks at a time, and as much in buffers, however many there are.
//!
//! Ranks have positions in zig-zag, so that each sees about as many pairs in every step if attention is causal (Brandon et al., "Striped
//! attention", 2023, has another order for the same purpose).
//!
//! Cost, of `degree` ranks: keys and values are sent `degree - 1` times in forward and in backward, and their gradients, in f32, `degree` times.

use crate::device::{DeviceError, Result};
use crate::kernels::{
    AttentionInputs, AttentionOutput, AttentionRule, AttentionScope, AttentionShape, Blocks,
};
use crate::tape::{AxisOps, OperationContext, PendingExchange, cast};
use crate::tensor::{Tensor, View};
use crate::values::Values;
use std::sync::Arc;
use trireme_base::{AxisPlace, DType, ExchangeKind, Positions};

/// What this rank of a ring attends to.
pub(super) struct RingAttention {
    ops: Arc<dyn AxisOps>,
    shape: AttentionShape,
    rule: AttentionRule,
}

impl RingAttention {
    /// On the ring of the context axis; `None` if it has one rank.
    pub(super) fn of(cx: &OperationContext<'_>, shape: AttentionShape, rule: AttentionRule) -> Option<Self> {
        let ops = Arc::clone(cx.context()?.ring.as_ref()?);
        Some(RingAttention { ops, shape, rule })
    }

    /// The keys that are here in a step: first this rank's own.
    fn scope(&self, step: usize) -> AttentionScope {
        let AxisPlace { rank, degree } = self.ops.place();
        let of = |rank, len| Positions::zig_zag(len * degree, AxisPlace { rank, degree });
        AttentionScope {
            rule: self.rule,
            queries: of(rank, self.shape.seq_len),
            keys: of((rank + degree - step) % degree, self.shape.num_keys),
        }
    }

    fn degree(&self) -> usize {
        self.ops.place().degree
    }

    /// The queries, and the keys and values of this rank, each in rows of their own.
    fn apart<'a>(
        &self,
        cx: &OperationContext<'_>,
        views: &AttentionInputs<View<'a>>,
    ) -> Result<[Values<'a>; 2]> {
        if let Some(keys_values) = views.keys_values {
            return Ok([Values::Stored(views.queries), Values::Stored(keys_values)]);
        }
        let [batch, len, q_cols, kv_cols] = self.sizes();
        let part = |first: usize, cols: usize| {
            let mut part = cx.empty([batch, len, cols], views.queries.dtype())?;
            let from = Blocks { offset: first, stride: q_cols + kv_cols };
            let to = (part.view_mut(), Blocks { offset: 0, stride: cols });
            cx.device().copy_blocks((views.queries, from), to, (batch * len, cols));
            Ok::<_, DeviceError>(Values::Converted(part))
        };
        Ok([part(0, q_cols)?, part(q_cols, kv_cols)?])
    }

    /// Sequences, their queries here, and columns of queries and of keys and values.
    fn sizes(&self) -> [usize; 4] {
        let AttentionShape { batch, seq_len, .. } = self.shape;
        [batch, seq_len, self.shape.query_cols(), self.shape.kv_cols()]
    }

    /// Sends keys and values on, unless this is the last step.
    fn send(
        &self,
        cx: &OperationContext<'_>,
        block: View<'_>,
        step: usize,
    ) -> Result<Option<PendingExchange>> {
        let shift = || self.ops.start(cx.device(), ExchangeKind::Shift, block);
        (step + 1 < self.degree()).then(shift).transpose()
    }

    /// The keys and values of the rank before, while those that are here were sent on.
    fn next(&self, cx: &OperationContext<'_>, shift: PendingExchange, block: View<'_>) -> Result<Tensor> {
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
        let [queries, mut block] = self.apart(cx, &views)?;
        let mut sums = cx.zeros([batch, len, self.shape.output_cols()], DType::F32)?;
        device.map_in_place(log_sums.view_mut(), 0, |_| f32::NEG_INFINITY);
        for step in 0..self.degree() {
            let shift = self.send(cx, block.view(), step)?;
            let views = AttentionInputs { queries: queries.view(), keys_values: Some(block.view()), ..views };
            let scope = self.scope(step);
            if scope.num_pairs() > 0 {
                device.attention_block(views, (self.shape, scope), sums.view_mut(), log_sums.view_mut())?;
            }
            if let Some(shift) = shift {
                block = Values::Converted(self.next(cx, shift, block.view())?);
            }
        }
        drop((queries, block));
        cast(device, sums, views.queries.dtype())
    }

    /// The gradients of the queries, and of keys and values if they lie apart.
    pub(super) fn backward(
        &self,
        cx: &OperationContext<'_>,
        views: AttentionInputs<View<'_>>,
        output: AttentionOutput<View<'_>>,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let (device, dtype, [batch, len, q_cols, kv_cols]) =
            (cx.device(), views.queries.dtype(), self.sizes());
        let [queries, mut block] = self.apart(cx, &views)?;
        let mut d_queries = cx.zeros([batch, len, q_cols], DType::F32)?;
        let mut d_block = cx.zeros(block.view().shape(), DType::F32)?;
        // The gradient of keys goes with them, and comes home with the last step.
        let mut d_shift = None;
        for step in 0..self.degree() {
            let shift = self.send(cx, block.view(), step)?;
            if let Some(d_shift) = d_shift.take() {
                self.ops.finish(device, d_shift, d_block.view_mut())?;
            }
            let views = AttentionInputs { queries: queries.view(), keys_values: Some(block.view()), ..views };
            let (scope, grads) = (self.scope(step), (d_queries.view_mut(), d_block.view_mut()));
            if scope.num_pairs() > 0 {
                device.attention_block_backward(views, (self.shape, scope), output, grads)?;
            }
            d_shift = Some(self.ops.start(device, ExchangeKind::Shift, d_block.view())?);
            if let Some(shift) = shift {
                block = Values::Converted(self.next(cx, shift, block.view())?);
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
            let to = (grad.view_mut(), Blocks { offset, stride: q_cols + kv_cols });
            device.copy_blocks((part.view(), Blocks { offset: 0, stride: cols }), to, (batch * len, cols));
        }
        Ok((grad, None))
    }
}
