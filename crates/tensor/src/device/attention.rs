//! Attention and rotary positions on a device.

use super::{Device, DeviceError};
use crate::kernels::cpu::Cpu;
use crate::kernels::cpu::element::{Element, with_element};
use crate::kernels::{AttentionInputs, AttentionRule, AttentionShape, CacheSpan, Place, Rotary};
use crate::tensor::{Tensor, View, ViewMut};
use trireme_base::{Cost, DType};

impl Device {
    /// Rotates query and key heads in place, with which each row of `qkv` begins; `inverse` is the gradient.
    pub(crate) fn rotary(
        &self,
        qkv: ViewMut<'_>,
        shape: AttentionShape,
        rotary: RotaryViews<'_>,
        inverse: bool,
    ) {
        let num_heads = shape.num_heads + shape.num_kv_heads;
        let num_rotated = shape.rows().saturating_mul(num_heads.saturating_mul(shape.head_dim));
        let cost = Cost::others(&[3, num_rotated]).updates(num_rotated.saturating_mul(qkv.dtype().size()));
        let RotaryViews { cos, sin, first_position } = rotary;
        let (mut qkv, cos, sin) = (qkv.into_place(), cos.place(), sin.place());
        self.issue("rotary", cost, move |cpu| {
            let rotary = Rotary { cos: cos.f32s(cpu), sin: sin.f32s(cpu), first_position };
            with_element!(qkv.dtype() => |T| cpu.rotary::<T>(qkv.elements(cpu), shape, rotary, inverse));
        });
    }

    /// Attention, whose rows are the positions of `batch` sequences: `y` is `[rows, output_cols]`, `log_sums` `[batch, num_heads, seq_len]`.
    ///
    /// # Errors
    /// If there is no scratch memory.
    pub(crate) fn attention(
        &self,
        inputs: AttentionViews<'_>,
        (shape, rule): (AttentionShape, AttentionRule),
        y: ViewMut<'_>,
        log_sums: ViewMut<'_>,
    ) -> Result<(), DeviceError> {
        let num_pairs = rule.num_pairs(shape.seq_len, shape.num_keys);
        let cost = inputs.read(forward_cost(shape, num_pairs));
        let cost = cost.writes(y.num_bytes()).writes(log_sums.num_bytes());
        let mut scratch = self.attention_scratch(y.dtype(), shape, false)?;
        let (inputs, mut y) = (inputs.places(), y.into_place());
        let (mut log_sums, mut scratch) = (log_sums.into_place(), scratch.view_mut().into_place());
        self.issue("attention", cost, move |cpu| {
            let (log_sums, scratch) = (log_sums.f32s(cpu), scratch.f32s(cpu));
            with_element!(y.dtype() => |T| {
                cpu.attention::<T>(inputs.elements(cpu), (shape, rule), y.elements(cpu), log_sums, scratch);
            });
        });
        Ok(())
    }

    fn attention_scratch(
        &self,
        dtype: DType,
        shape: AttentionShape,
        backward: bool,
    ) -> Result<Tensor, DeviceError> {
        let len = with_element!(dtype => |T| self.cpu.attention_scratch::<T>(shape, 0, backward));
        self.activation([len])
    }

    /// Causal attention after the positions of a cache, which takes the new keys and values: it is `[batch, capacity, kv_cols]`, `y`
    /// `[rows, output_cols]`; all in f32.
    ///
    /// # Errors
    /// If there is no scratch memory.
    pub(crate) fn attention_cached(
        &self,
        qkv: View<'_>,
        (shape, rule): (AttentionShape, AttentionRule),
        cache: CacheViews<'_>,
        y: ViewMut<'_>,
        log_sums: ViewMut<'_>,
    ) -> Result<(), DeviceError> {
        // Those of all positions, without those of the positions before.
        let CacheViews { keys, values, capacity, len } = cache;
        let num_positions = len + shape.seq_len;
        let num_pairs = rule.num_pairs(num_positions, num_positions) - rule.num_pairs(len, len);
        let of_positions = |num: usize| num * 2 * shape.kv_cols() * size_of::<f32>();
        let cost = forward_cost(shape, num_pairs).reads(qkv.num_bytes() + of_positions(len));
        let written = y.num_bytes() + log_sums.num_bytes() + of_positions(shape.seq_len);
        let mut scratch = self.activation([self.cpu.attention_scratch::<f32>(shape, len, false)])?;
        let (qkv, mut keys, mut values) = (qkv.place(), keys.into_place(), values.into_place());
        let (mut y, mut log_sums) = (y.into_place(), log_sums.into_place());
        let mut scratch = scratch.view_mut().into_place();
        self.issue("attention_cached", cost.writes(written), move |cpu| {
            let mut cache = CacheSpan { keys: keys.f32s(cpu), values: values.f32s(cpu), capacity, len };
            let (y, log_sums, scratch) = (y.f32s(cpu), log_sums.f32s(cpu), scratch.f32s(cpu));
            cpu.attention_cached(qkv.f32s(cpu), (shape, rule), &mut cache, y, log_sums, scratch);
        });
        Ok(())
    }

    /// Gradient of [`Device::attention`] with respect to the queries, and to keys and values if they lie apart. Gradients
    /// have the shapes of what they are gradients of.
    ///
    /// # Errors
    /// If there is no scratch memory.
    pub(crate) fn attention_backward(
        &self,
        inputs: AttentionViews<'_>,
        (shape, rule): (AttentionShape, AttentionRule),
        (y, log_sums, dy): (View<'_>, View<'_>, View<'_>),
        (d_queries, d_keys_values): (ViewMut<'_>, Option<ViewMut<'_>>),
    ) -> Result<(), DeviceError> {
        // Five products: the scores once more, and the gradients of weights, values, queries and keys.
        let num_pairs = rule.num_pairs(shape.seq_len, shape.num_keys);
        let exponentials = Cost::others(&[Cost::EXP + 5, shape.batch, shape.num_heads, num_pairs]);
        let products = Cost::products(&[10, shape.batch, shape.output_cols(), num_pairs]);
        let output_bytes = y.num_bytes() + log_sums.num_bytes() + dy.num_bytes();
        let written_bytes = d_queries.num_bytes() + d_keys_values.as_ref().map_or(0, ViewMut::num_bytes);
        let cost = inputs.read(products + exponentials).reads(output_bytes).writes(written_bytes);
        let mut scratch = self.attention_scratch(y.dtype(), shape, true)?;
        let (inputs, y, log_sums, dy) = (inputs.places(), y.place(), log_sums.place(), dy.place());
        let (mut d_queries, mut d_keys_values) =
            (d_queries.into_place(), d_keys_values.map(ViewMut::into_place));
        let mut scratch = scratch.view_mut().into_place();
        self.issue("attention_backward", cost, move |cpu| {
            with_element!(y.dtype() => |T| {
                let output = (y.elements(cpu), log_sums.f32s(cpu), dy.elements(cpu));
                let d_keys_values = d_keys_values.as_mut().map(|grad| grad.elements(cpu));
                let (grads, scratch) = ((d_queries.elements(cpu), d_keys_values), scratch.f32s(cpu));
                cpu.attention_backward::<T>(inputs.elements(cpu), (shape, rule), output, grads, scratch);
            });
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

    fn places(&self) -> AttentionPlaces {
        AttentionPlaces {
            queries: self.queries.place(),
            keys_values: self.keys_values.map(|view| view.place()),
            num_keys: self.num_keys.map(|view| view.place()),
        }
    }
}

/// The places of [`AttentionViews`].
struct AttentionPlaces {
    queries: Place,
    keys_values: Option<Place>,
    num_keys: Option<Place>,
}

impl AttentionPlaces {
    fn elements<'c, T: Element>(&self, cpu: &'c Cpu) -> AttentionInputs<'c, T> {
        AttentionInputs {
            queries: self.queries.elements(cpu),
            keys_values: self.keys_values.map(|place| place.elements(cpu)),
            num_keys: self.num_keys.map(|place| place.u32s(cpu)),
        }
    }
}

/// Cosines and sines of rotary positions, `[positions, head_dim / 2]` each.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RotaryViews<'a> {
    pub(crate) cos: View<'a>,
    pub(crate) sin: View<'a>,
    /// Position of the first row of each sequence.
    pub(crate) first_position: usize,
}

/// Keys and values of earlier positions, `[batch, capacity, kv_cols]` each.
#[derive(Debug)]
pub(crate) struct CacheViews<'a> {
    pub(crate) keys: ViewMut<'a>,
    pub(crate) values: ViewMut<'a>,
    /// Positions there is room for.
    pub(crate) capacity: usize,
    /// Positions already held.
    pub(crate) len: usize,
}
