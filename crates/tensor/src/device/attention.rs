//! Attention and rotary positions on a device.

use super::{Device, DeviceError};
use crate::kernels::cpu::Cpu;
use crate::kernels::cpu::element::{Element, with_element};
use crate::kernels::{
    AttentionInputs, AttentionRule, AttentionScope, AttentionShape, CacheSpan, LatentHeadShape, Place,
    Results, Rotary,
};
use crate::shape::Shape;
use crate::tensor::{Tensor, View, ViewMut};
use trireme_base::{Cost, DType, Positions};

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
        let RotaryViews { cos, sin, positions } = rotary;
        let (mut qkv, cos, sin) = (qkv.into_place(), cos.place(), sin.place());
        self.issue("rotary", cost, move |cpu| {
            let rotary = Rotary { cos: cos.f32s(cpu), sin: sin.f32s(cpu), positions };
            with_element!(qkv.dtype() => |T| cpu.rotary::<T>(qkv.elements(cpu), shape, rotary, inverse));
        });
    }

    /// Rows of heads of latent attention, of `[queries, keys_values, shared_key]` (see [`LatentHeads`](crate::tape::LatentHeads)).
    pub(crate) fn latent_heads(
        &self,
        shape: LatentHeadShape,
        inputs: [View<'_>; 3],
        rotary: RotaryViews<'_>,
        qkv: ViewMut<'_>,
    ) {
        let read = inputs.iter().map(View::num_bytes).sum();
        let cost = latent_cost(shape, qkv.shape()).reads(read).writes(qkv.num_bytes());
        let (seq_len, dtype) = (qkv.shape().dims()[1], qkv.dtype());
        let RotaryViews { cos, sin, positions } = rotary;
        let (inputs, cos, sin, mut qkv) =
            (inputs.map(|input| input.place()), cos.place(), sin.place(), qkv.into_place());
        self.issue("latent_heads", cost, move |cpu| {
            let rotary = Rotary { cos: cos.f32s(cpu), sin: sin.f32s(cpu), positions };
            with_element!(dtype => |T| {
                let inputs = inputs.each_ref().map(|input| input.elements(cpu));
                cpu.latent_heads::<T>(shape, inputs, (rotary, seq_len), qkv.elements(cpu));
            });
        });
    }

    /// The gradients of the inputs of [`latent_heads`](Device::latent_heads).
    pub(crate) fn latent_heads_backward(
        &self,
        shape: LatentHeadShape,
        grad: View<'_>,
        rotary: RotaryViews<'_>,
        grads: [ViewMut<'_>; 3],
    ) {
        let written = grads.iter().map(ViewMut::num_bytes).sum();
        let cost = latent_cost(shape, grad.shape()).reads(grad.num_bytes()).writes(written);
        let (seq_len, dtype) = (grad.shape().dims()[1], grad.dtype());
        let RotaryViews { cos, sin, positions } = rotary;
        let (grad, cos, sin, mut grads) =
            (grad.place(), cos.place(), sin.place(), grads.map(ViewMut::into_place));
        self.issue("latent_heads_backward", cost, move |cpu| {
            let rotary = Rotary { cos: cos.f32s(cpu), sin: sin.f32s(cpu), positions };
            with_element!(dtype => |T| {
                let grads = grads.each_mut().map(|grad| grad.elements(cpu));
                cpu.latent_heads_backward::<T>(shape, grad.elements(cpu), (rotary, seq_len), grads);
            });
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
        let dtype = inputs.queries.dtype();
        assert_eq!(y.dtype(), dtype);
        let of = (shape, AttentionScope::whole(shape, rule));
        let cost = forward_cost(shape, of.1.num_pairs());
        let cost = inputs.read(cost).writes(y.num_bytes()).writes(log_sums.num_bytes());
        let mut scratch = self.attention_scratch(dtype, shape, false)?;
        let (inputs, mut y) = (inputs.places(), y.into_place());
        let (mut log_sums, mut scratch) = (log_sums.into_place(), scratch.view_mut().into_place());
        self.issue("attention", cost, move |cpu| {
            let (log_sums, scratch) = (log_sums.f32s(cpu), scratch.f32s(cpu));
            with_element!(dtype => |T| {
                let y = Results::Elements(y.elements(cpu));
                cpu.attention::<T>(inputs.elements(cpu), of, y, log_sums, scratch);
            });
        });
        Ok(())
    }

    /// Takes some keys into attention: `y`, in f32, and `log_sums`, shaped as in [`Device::attention`], hold the results for other keys, or
    /// zeros and negative infinity; they become those for all. Over all keys, block by block, it is the same as attention, in another order
    /// of sums.
    ///
    /// # Errors
    /// If there is no scratch memory.
    pub(crate) fn attention_block(
        &self,
        inputs: AttentionViews<'_>,
        of: (AttentionShape, AttentionScope),
        y: ViewMut<'_>,
        log_sums: ViewMut<'_>,
    ) -> Result<(), DeviceError> {
        let dtype = inputs.queries.dtype();
        let cost = forward_cost(of.0, of.1.num_pairs());
        let cost = inputs.read(cost).updates(y.num_bytes()).updates(log_sums.num_bytes());
        let mut scratch = self.attention_scratch(dtype, of.0, false)?;
        let (inputs, mut y) = (inputs.places(), y.into_place());
        let (mut log_sums, mut scratch) = (log_sums.into_place(), scratch.view_mut().into_place());
        self.issue("attention_block", cost, move |cpu| {
            let (log_sums, scratch) = (log_sums.f32s(cpu), scratch.f32s(cpu));
            let y = y.f32s(cpu);
            with_element!(dtype => |T| {
                cpu.attention::<T>(inputs.elements(cpu), of, Results::Sums(y), log_sums, scratch);
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

    /// Causal attention after the positions of a cache, which takes the new keys and values: they are `[batch, capacity, key_cols]` and `[.., value_cols]`, `y`
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
        let CacheViews { keys, values, capacity, len } = cache;
        let num_pairs = AttentionScope::after(len, shape, rule).num_pairs();
        let of_positions = |num: usize| num * shape.kv_cols() * size_of::<f32>();
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
        output: OutputViews<'_>,
        (d_queries, d_keys_values): (ViewMut<'_>, Option<ViewMut<'_>>),
    ) -> Result<(), DeviceError> {
        let dtype = inputs.queries.dtype();
        assert_eq!(d_queries.dtype(), dtype);
        let of = (shape, AttentionScope::whole(shape, rule));
        let written_bytes = d_queries.num_bytes() + d_keys_values.as_ref().map_or(0, ViewMut::num_bytes);
        let cost = output.read(inputs.read(backward_cost(shape, of.1.num_pairs()))).writes(written_bytes);
        let mut scratch = self.attention_scratch(dtype, shape, true)?;
        let (inputs, output) = (inputs.places(), output.places());
        let (mut d_queries, mut d_keys_values) =
            (d_queries.into_place(), d_keys_values.map(ViewMut::into_place));
        let mut scratch = scratch.view_mut().into_place();
        self.issue("attention_backward", cost, move |cpu| {
            with_element!(dtype => |T| {
                let d_keys_values = d_keys_values.as_mut().map(|grad| Results::Elements(grad.elements(cpu)));
                let grads = (Results::Elements(d_queries.elements(cpu)), d_keys_values);
                let (inputs, scratch) = (inputs.elements(cpu), scratch.f32s(cpu));
                cpu.attention_backward::<T>(inputs, of, output.elements(cpu), grads, scratch);
            });
        });
        Ok(())
    }

    /// Adds the gradients of [`Device::attention_block`] with respect to queries, keys and values, in f32. `output` is that for all keys.
    ///
    /// # Errors
    /// If there is no scratch memory.
    pub(crate) fn attention_block_backward(
        &self,
        inputs: AttentionViews<'_>,
        of: (AttentionShape, AttentionScope),
        output: OutputViews<'_>,
        (d_queries, d_keys_values): (ViewMut<'_>, ViewMut<'_>),
    ) -> Result<(), DeviceError> {
        let dtype = inputs.queries.dtype();
        let updated_bytes = d_queries.num_bytes() + d_keys_values.num_bytes();
        let cost = output.read(inputs.read(backward_cost(of.0, of.1.num_pairs()))).updates(updated_bytes);
        let mut scratch = self.attention_scratch(dtype, of.0, true)?;
        let (inputs, output) = (inputs.places(), output.places());
        let (mut d_queries, mut d_keys_values) = (d_queries.into_place(), d_keys_values.into_place());
        let mut scratch = scratch.view_mut().into_place();
        self.issue("attention_block_backward", cost, move |cpu| {
            let grads = (d_queries.f32s(cpu), d_keys_values.f32s(cpu));
            let scratch = scratch.f32s(cpu);
            with_element!(dtype => |T| {
                let grads = (Results::Sums(grads.0), Some(Results::Sums(grads.1)));
                cpu.attention_backward::<T>(inputs.elements(cpu), of, output.elements(cpu), grads, scratch);
            });
        });
        Ok(())
    }
}

/// Rotation of the parts of all heads; without what is read and written.
fn latent_cost(shape: LatentHeadShape, qkv: Shape) -> Cost {
    Cost::others(&[3, qkv.rows(), (shape.num_heads + 1) * shape.rotary_dim])
}

/// Two products of queries with the keys that they see, and the softmax between them; without what is read and written.
fn forward_cost(shape: AttentionShape, num_pairs: usize) -> Cost {
    Cost::products(&[2, shape.batch, shape.query_cols() + shape.output_cols(), num_pairs])
        + Cost::others(&[Cost::EXP + 4, shape.batch, shape.num_heads, num_pairs])
}

/// Five products: the scores once more, and the gradients of weights, values, queries and keys; without what is read and written.
fn backward_cost(shape: AttentionShape, num_pairs: usize) -> Cost {
    Cost::products(&[2, shape.batch, 3 * shape.query_cols() + 2 * shape.output_cols(), num_pairs]).repeats(&[
        2,
        shape.batch,
        shape.query_cols(),
        num_pairs,
    ]) + Cost::others(&[Cost::EXP + 5, shape.batch, shape.num_heads, num_pairs])
}

/// What forward has made, and its gradient.
#[derive(Debug, Clone, Copy)]
pub(crate) struct OutputViews<'a> {
    pub(crate) y: View<'a>,
    pub(crate) log_sums: View<'a>,
    pub(crate) dy: View<'a>,
}

impl OutputViews<'_> {
    /// The same cost, and these read.
    fn read(&self, cost: Cost) -> Cost {
        cost.reads(self.y.num_bytes() + self.log_sums.num_bytes() + self.dy.num_bytes())
    }

    fn places(&self) -> OutputPlaces {
        OutputPlaces { y: self.y.place(), log_sums: self.log_sums.place(), dy: self.dy.place() }
    }
}

/// The places of [`OutputViews`].
struct OutputPlaces {
    y: Place,
    log_sums: Place,
    dy: Place,
}

impl OutputPlaces {
    fn elements<'c, T: Element>(&self, cpu: &'c Cpu) -> (&'c [T], &'c [f32], &'c [T]) {
        (self.y.elements(cpu), self.log_sums.f32s(cpu), self.dy.elements(cpu))
    }
}

/// Queries, keys and values.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AttentionViews<'a> {
    pub(crate) queries: View<'a>,
    /// Rows of key heads and value heads; `None` if they follow the query heads in the rows of `queries`.
    pub(crate) keys_values: Option<View<'a>>,
    /// Of each sequence, the position from which on its keys are padding (u32); `None` if none is.
    pub(crate) num_keys: Option<View<'a>>,
    /// Of each query, the position at which its document begins (u32); `None` if that of the sequence is one.
    pub(crate) document_starts: Option<View<'a>>,
}

impl<'a> AttentionViews<'a> {
    /// Queries, keys and values in the same rows, without padding.
    pub(crate) fn together(rows: View<'a>) -> Self {
        AttentionViews { queries: rows, keys_values: None, num_keys: None, document_starts: None }
    }

    /// The same cost, and these read.
    fn read(&self, cost: Cost) -> Cost {
        let others = [self.keys_values, self.num_keys, self.document_starts].into_iter().flatten();
        cost.reads(self.queries.num_bytes() + others.map(|view| view.num_bytes()).sum::<usize>())
    }

    fn places(&self) -> AttentionPlaces {
        AttentionPlaces {
            queries: self.queries.place(),
            keys_values: self.keys_values.map(|view| view.place()),
            num_keys: self.num_keys.map(|view| view.place()),
            document_starts: self.document_starts.map(|view| view.place()),
        }
    }
}

/// The places of [`AttentionViews`].
struct AttentionPlaces {
    queries: Place,
    keys_values: Option<Place>,
    num_keys: Option<Place>,
    document_starts: Option<Place>,
}

impl AttentionPlaces {
    fn elements<'c, T: Element>(&self, cpu: &'c Cpu) -> AttentionInputs<'c, T> {
        AttentionInputs {
            queries: self.queries.elements(cpu),
            keys_values: self.keys_values.map(|place| place.elements(cpu)),
            num_keys: self.num_keys.map(|place| place.u32s(cpu)),
            document_starts: self.document_starts.map(|place| place.u32s(cpu)),
        }
    }
}

/// Cosines and sines of rotary positions, `[positions, head_dim / 2]` each.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RotaryViews<'a> {
    pub(crate) cos: View<'a>,
    pub(crate) sin: View<'a>,
    /// Positions of the rows of each sequence.
    pub(crate) positions: Positions,
}

/// Keys and values of earlier positions, `[batch, capacity, key_cols]` and `[batch, capacity, value_cols]`.
#[derive(Debug)]
pub(crate) struct CacheViews<'a> {
    pub(crate) keys: ViewMut<'a>,
    pub(crate) values: ViewMut<'a>,
    /// Positions there is room for.
    pub(crate) capacity: usize,
    /// Positions already held.
    pub(crate) len: usize,
}
