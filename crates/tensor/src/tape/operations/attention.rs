use crate::device::{AttentionViews, CacheViews, Device, DeviceError, RotaryViews};
use crate::kernels::{AttentionRule, AttentionShape};
use crate::shape::Shape;
use crate::tape::{BackwardContext, ForwardContext, Operation, ReadBy, Recorder, Var};
use crate::tensor::Tensor;
use std::ops::RangeInclusive;
use std::sync::Arc;
use trireme_base::{Category, DType};

/// Cosines and sines for every position of a rotary embedding, `[positions, head_dim / 2]` each.
#[derive(Debug)]
pub struct RotaryTable {
    cos: Tensor,
    sin: Tensor,
    /// Angle per position of each pair.
    frequencies: Vec<f64>,
}

impl RotaryTable {
    /// The table for `positions`; `frequencies` holds the angle per position of each of the `head_dim / 2` pairs.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub fn new(device: &Device, positions: usize, frequencies: &[f64]) -> Result<Self, DeviceError> {
        let shape = [positions, frequencies.len()].into();
        let mut cos = device.empty(shape, DType::F32, Category::Parameters)?;
        let mut sin = device.empty(shape, DType::F32, Category::Parameters)?;
        let frequencies = frequencies.to_vec();
        if device.is_counting() {
            return Ok(RotaryTable { cos, sin, frequencies });
        }
        for (table, function) in [(&mut cos, f64::cos as fn(f64) -> f64), (&mut sin, f64::sin)] {
            device.fill(table.view_mut(), |values: &mut [f32]| {
                for (index, value) in values.iter_mut().enumerate() {
                    let (position, pair) = (index / frequencies.len(), index % frequencies.len());
                    *value = function(position as f64 * frequencies[pair]) as f32;
                }
                Ok::<_, DeviceError>(())
            })?;
        }
        Ok(RotaryTable { cos, sin, frequencies })
    }

    /// The same angles for another number of positions.
    ///
    /// # Errors
    /// If there is no memory for them.
    pub fn with_positions(&self, device: &Device, positions: usize) -> Result<Self, DeviceError> {
        RotaryTable::new(device, positions, &self.frequencies)
    }

    pub(crate) fn at(&self, first_position: usize) -> RotaryViews<'_> {
        RotaryViews { cos: self.cos.view(), sin: self.sin.view(), first_position }
    }
}

/// Keys and values of the positions that a layer has seen, for generation.
#[derive(Debug)]
pub struct KeyValueCache {
    keys: Tensor,
    values: Tensor,
    len: usize,
}

impl KeyValueCache {
    /// An empty cache for `batch` sequences of up to `capacity` positions; `kv_cols` elements each.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub fn new(device: &Device, batch: usize, capacity: usize, kv_cols: usize) -> Result<Self, DeviceError> {
        let tensor = || device.activation([batch, capacity, kv_cols]);
        Ok(KeyValueCache { keys: tensor()?, values: tensor()?, len: 0 })
    }

    /// Positions held.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no position is held.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Positions there is room for.
    pub fn capacity(&self) -> usize {
        self.keys.shape().dims()[1]
    }
}

/// Attention within sequences, as `[batch, seq_len, num_heads * head_dim]` in the tape's precision.
///
/// Of rows of query heads, key heads and value heads (`[batch, seq_len, qkv_cols]`); or of queries (`[batch, seq_len, num_heads *
/// head_dim]`) and, apart, rows of key heads and value heads (`[batch, num_keys, 2 * num_kv_heads * head_dim]`).
#[derive(Debug, Clone)]
pub struct Attention {
    /// Query heads.
    pub num_heads: usize,
    /// Key-value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Which keys a query sees, and how scores become weights.
    pub rule: AttentionRule,
    /// Whether there is one more input, `[batch]` in u32: how many keys of each sequence are not padding.
    pub is_padded: bool,
    /// Rotates queries and keys first. The table must cover every position. `None` if keys and values are a separate input.
    pub rotary: Option<Arc<RotaryTable>>,
}

impl Attention {
    /// The sizes for queries, or queries with keys and values, of this shape, and for keys and values that lie apart.
    ///
    /// # Panics
    /// If a shape has other dims.
    pub fn shape(&self, queries: Shape, keys_values: Option<Shape>) -> AttentionShape {
        let &[batch, seq_len, _] = queries.dims() else {
            panic!("{queries:?} is not [batch, seq_len, cols]")
        };
        let num_keys = keys_values.map_or(seq_len, |shape| shape.dims()[1]);
        let Attention { num_heads, num_kv_heads, head_dim, .. } = *self;
        AttentionShape { batch, seq_len, num_heads, num_kv_heads, head_dim, num_keys }
    }

    /// Whether keys and values lie apart, of an operation with so many inputs.
    fn is_apart(&self, num_inputs: usize) -> bool {
        num_inputs > 1 + usize::from(self.is_padded)
    }
}

impl Operation for Attention {
    fn num_inputs(&self) -> RangeInclusive<usize> {
        if self.is_padded { 2..=3 } else { 1..=2 }
    }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<(), DeviceError> {
        let (last, is_apart) = (cx.num_inputs() - 1, self.is_apart(cx.num_inputs()));
        let dtype = cx.input(0).dtype();
        let shape = self.shape(cx.input(0).shape(), is_apart.then(|| cx.input(1).shape()));
        let rotated = match &self.rotary {
            Some(_) if is_apart => panic!("queries and keys are rotated where they lie together"),
            Some(rotary) => rotate(cx, shape, rotary)?,
            None => None,
        };
        let mut y = cx.empty([shape.batch, shape.seq_len, shape.output_cols()], dtype)?;
        let mut log_sums = cx.empty_to_save([shape.batch, shape.num_heads, shape.seq_len], DType::F32)?;
        let inputs = AttentionViews {
            queries: rotated.as_ref().map_or(cx.input(0), Tensor::view),
            keys_values: is_apart.then(|| cx.input(1)),
            num_keys: self.is_padded.then(|| cx.input(last)),
        };
        cx.device().attention(inputs, (shape, self.rule), y.view_mut(), log_sums.view_mut())?;
        cx.save(log_sums);
        if let Some(rotated) = rotated {
            cx.save(rotated);
        }
        cx.output(y);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<(), DeviceError> {
        let (last, is_apart) = (cx.num_inputs() - 1, self.is_apart(cx.num_inputs()));
        let inputs = AttentionViews {
            queries: cx.saved(1).unwrap_or_else(|| cx.input(0)),
            keys_values: is_apart.then(|| cx.input(1)),
            num_keys: self.is_padded.then(|| cx.input(last)),
        };
        let AttentionViews { queries, keys_values, .. } = inputs;
        let shape = self.shape(queries.shape(), keys_values.map(|view| view.shape()));
        let mut d_queries = cx.empty(queries.shape(), queries.dtype())?;
        let mut d_keys_values = keys_values.map(|view| cx.empty(view.shape(), view.dtype())).transpose()?;
        let log_sums = cx.saved(0).expect("forward has saved them");
        let output = (cx.output(0), log_sums, cx.grad());
        let grads = (d_queries.view_mut(), d_keys_values.as_mut().map(Tensor::view_mut));
        cx.device().attention_backward(inputs, (shape, self.rule), output, grads)?;
        if let Some(rotary) = &self.rotary {
            cx.device().rotary(d_queries.view_mut(), shape, rotary.at(cx.first_position()), true);
        }
        cx.add_grad(0, d_queries)?;
        d_keys_values.map_or(Ok(()), |grad| cx.add_grad(1, grad))
    }

    fn reads_output(&self, _: usize) -> ReadBy {
        ReadBy::INPUT_HALF
    }
}

/// Rotates queries and keys: in the memory of the input, or in a copy where somebody else reads it.
fn rotate(
    cx: &mut ForwardContext<'_>,
    shape: AttentionShape,
    rotary: &RotaryTable,
) -> Result<Option<Tensor>, DeviceError> {
    let (device, first) = (cx.device().clone(), cx.first_position());
    if let Some(qkv) = cx.input_mut(0) {
        device.rotary(qkv, shape, rotary.at(first), false);
        return Ok(None);
    }
    let mut rotated = cx.copy_input(0)?;
    device.rotary(rotated.view_mut(), shape, rotary.at(first), false);
    Ok(Some(rotated))
}

impl Recorder<'_> {
    /// As [`Attention`] for rows that follow the positions of `cache`, which takes them in.
    ///
    /// # Errors
    /// If there is no memory for the result.
    ///
    /// # Panics
    /// If the tape records, its precision is not f32, or the cache is full.
    pub fn attention_cached(
        &mut self,
        attention: &Attention,
        qkv: Var,
        cache: &mut KeyValueCache,
    ) -> Result<Var, DeviceError> {
        let (tape, _) = self.unrecorded();
        let shape = attention.shape(tape.values[qkv.0].tensor().shape(), None);
        let sharding = tape.values[qkv.0].sharding;
        let mut qkv = tape.take_value(qkv.id());
        if let Some(rotary) = &attention.rotary {
            tape.device.rotary(qkv.view_mut(), shape, rotary.at(cache.len), false);
        }
        let mut y = tape.device.activation([shape.batch, shape.seq_len, shape.output_cols()])?;
        let mut log_sums = tape.device.activation([shape.batch, shape.num_heads, shape.seq_len])?;
        let (capacity, len) = (cache.capacity(), cache.len);
        let (keys, values) = (cache.keys.view_mut(), cache.values.view_mut());
        let views = CacheViews { keys, values, capacity, len };
        let (y_view, log_sums) = (y.view_mut(), log_sums.view_mut());
        tape.device.attention_cached(qkv.view(), (shape, attention.rule), views, y_view, log_sums)?;
        cache.len += shape.seq_len;
        let attended = tape.constant(y);
        tape.values[attended.0].sharding = sharding;
        Ok(attended)
    }
}
