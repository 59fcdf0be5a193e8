//! Attention and rotary positions on a device.

use super::{Device, DeviceError};
use crate::kernels::cpu::element::{Element, with_element};
use crate::kernels::{AttentionInputs, AttentionRule, AttentionShape, CacheSpan, Rotary};
use crate::tensor::{View, ViewMut};
use trireme_base::Cost;

impl Device {
    /// Rotates query and key heads in place; `inverse` is the gradient.
    pub(crate) fn rotary(
        &self,
        mut qkv: ViewMut<'_>,
        shape: AttentionShape,
        rotary: Rotary<'_>,
        inverse: bool,
    ) {
        let num_heads = shape.num_heads + shape.num_kv_heads;
        let num_rotated = shape.rows().saturating_mul(num_heads.saturating_mul(shape.head_dim));
        self.count(
            "rotary",
            Cost::others(&[3, num_rotated]).updates(num_rotated.saturating_mul(qkv.dtype().size())),
        );
        with_element!(qkv.dtype() => |T| self.cpu.rotary::<T>(qkv.elements(), shape, rotary, inverse));
    }

    /// Attention: `y` is `[rows, output_cols]`, `log_sums` `[batch, num_heads, seq_len]`.
    ///
    /// # Errors
    /// If there is no scratch memory.
    pub(crate) fn attention(
        &self,
        inputs: AttentionViews<'_>,
        (shape, rule): (AttentionShape, AttentionRule),
        mut y: ViewMut<'_>,
        mut log_sums: ViewMut<'_>,
    ) -> Result<(), DeviceError> {
        let num_pairs = rule.num_pairs(shape.seq_len, shape.num_keys);
        let cost = inputs.read(forward_cost(shape, num_pairs));
        self.count("attention", cost.writes(y.num_bytes()).writes(log_sums.num_bytes()));
        let log_sums = log_sums.f32s();
        with_element!(y.dtype() => |T| {
            let mut scratch = self.activation([self.cpu.attention_scratch::<T>(shape, 0, false)])?;
            let mut scratch = scratch.view_mut();
            let inputs = inputs.elements::<T>();
            self.cpu.attention::<T>(inputs, (shape, rule), y.elements(), log_sums, scratch.f32s());
        });
        Ok(())
    }

    /// Causal attention after the positions of a cache, which takes the new keys and values; all in f32.
    ///
    /// # Errors
    /// If there is no scratch memory.
    pub(crate) fn attention_cached(
        &self,
        qkv: View<'_>,
        (shape, rule): (AttentionShape, AttentionRule),
        cache: &mut CacheSpan<'_>,
        mut y: ViewMut<'_>,
        mut log_sums: ViewMut<'_>,
    ) -> Result<(), DeviceError> {
        // Those of all positions, without those of the positions before.
        let num_positions = cache.len + shape.seq_len;
        let num_pairs = rule.num_pairs(num_positions, num_positions) - rule.num_pairs(cache.len, cache.len);
        let of_positions = |num: usize| num * 2 * shape.kv_cols() * size_of::<f32>();
        let cost = forward_cost(shape, num_pairs).reads(qkv.num_bytes() + of_positions(cache.len));
        let written = y.num_bytes() + log_sums.num_bytes() + of_positions(shape.seq_len);
        self.count("attention_cached", cost.writes(written));
        let num_elements = self.cpu.attention_scratch::<f32>(shape, cache.len, false);
        let mut scratch = self.activation([num_elements])?;
        let (mut scratch, of) = (scratch.view_mut(), (shape, rule));
        self.cpu.attention_cached(qkv.f32s(), of, cache, y.f32s(), log_sums.f32s(), scratch.f32s());
        Ok(())
    }

    /// Gradient of [`Device::attention`] with respect to the queries, and to keys and values if they lie apart.
    ///
    /// # Errors
    /// If there is no scratch memory.
    pub(crate) fn attention_backward(
        &self,
        inputs: AttentionViews<'_>,
        (shape, rule): (AttentionShape, AttentionRule),
        (y, log_sums, dy): (View<'_>, View<'_>, View<'_>),
        (mut d_queries, mut d_keys_values): (ViewMut<'_>, Option<ViewMut<'_>>),
    ) -> Result<(), DeviceError> {
        // Five products: the scores once more, and the gradients of weights, values, queries and keys.
        let num_pairs = rule.num_pairs(shape.seq_len, shape.num_keys);
        let exponentials = Cost::others(&[Cost::EXP + 5, shape.batch, shape.num_heads, num_pairs]);
        let products = Cost::products(&[10, shape.batch, shape.output_cols(), num_pairs]);
        let output_bytes = y.num_bytes() + log_sums.num_bytes() + dy.num_bytes();
        let written_bytes = d_queries.num_bytes() + d_keys_values.as_ref().map_or(0, ViewMut::num_bytes);
        self.count(
            "attention_backward",
            inputs.read(products + exponentials).reads(output_bytes).writes(written_bytes),
        );
        with_element!(y.dtype() => |T| {
            let mut scratch = self.activation([self.cpu.attention_scratch::<T>(shape, 0, true)])?;
            let mut scratch = scratch.view_mut();
            let output = (y.elements(), log_sums.f32s(), dy.elements());
            let grads = (d_queries.elements(), d_keys_values.as_mut().map(ViewMut::elements));
            self.cpu.attention_backward::<T>(inputs.elements(), (shape, rule), output, grads, scratch.f32s());
        });
        Ok(())
    }
}

/// Two products of queries with the keys that they see, and the softmax between them; without what is read and written.
fn forward_cost(shape: AttentionShape, num_pairs: usize) -> Cost {
    Cost::products(&[4, shape.batch, shape.output_cols(), num_pairs])
        + Cost::others(&[Cost::EXP + 4, shape.batch, shape.num_heads, num_pairs])
}

/// Queries, keys and values.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttentionViews<'a> {
    pub(crate) queries: View<'a>,
    /// Rows of key heads and value heads; `None` if they follow the query heads in the rows of `queries`.
    pub(crate) keys_values: Option<View<'a>>,
    /// Of each sequence, how many of its keys are not padding (u32); `None` if none is.
    pub(crate) num_keys: Option<View<'a>>,
}

impl<'a> AttentionViews<'a> {
    /// The same cost, and these read.
    fn read(&self, cost: Cost) -> Cost {
        let others = [self.keys_values, self.num_keys].into_iter().flatten();
        cost.reads(self.queries.num_bytes() + others.map(|view| view.num_bytes()).sum::<usize>())
    }

    fn elements<T: Element>(self) -> AttentionInputs<'a, T> {
        AttentionInputs {
            queries: self.queries.elements(),
            keys_values: self.keys_values.map(|view| view.elements()),
            num_keys: self.num_keys.map(|view| view.u32s()),
        }
    }
}
