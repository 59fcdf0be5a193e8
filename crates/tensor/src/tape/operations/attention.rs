use super::exchange_heads::{ExchangeHeads, HeadGroup};
use super::ring_attention::RingAttention;
use crate::device::{CacheViews, Device, DeviceError, Result};
use crate::kernels::{AttentionInputs, AttentionOutput, AttentionRule, AttentionShape, Rotary};
use crate::shape::Shape;
use crate::tape::{
    BackwardContext, ForwardContext, InputOrOutput, Op, Operation, OperationContext, Recorder, Var, declares,
};
use crate::tensor::Tensor;
use crate::view::View;
use std::sync::Arc;
use trireme_base::{Category, DType, Positions};

/// Cosines and sines of rotary position embeddings, `[positions, head_dim / 2]` each.
#[derive(Debug)]
pub struct RotaryTable {
    cos: Tensor,
    sin: Tensor,
    /// Angle per position of each pair of elements.
    frequencies: Vec<f64>,
    amplitude: f32,
    scaling: Option<DynamicScaling>,
}

/// Rotary frequencies that decrease with the number of positions of the table, for sequences longer than in pretraining ("dynamic NTK":
/// Peng et al., "YaRN", 2023, section 3.3).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DynamicScaling {
    /// Scaling factor. In a table of `s > 1` times [`original_positions`](DynamicScaling::original_positions), the last frequency is
    /// divided by `factor * s - (factor - 1)`.
    pub factor: f64,
    /// Number of positions up to which frequencies are unchanged.
    pub original_positions: usize,
}

impl DynamicScaling {
    /// Returns the frequencies of a table with `positions` positions. The base of the frequencies grows: the first frequency is unchanged,
    /// the last one is divided by the growth.
    fn apply(&self, frequencies: &[f64], positions: usize) -> Vec<f64> {
        let longer = (positions as f64 / self.original_positions as f64).max(1.0);
        let growth = self.factor * longer - (self.factor - 1.0);
        let last = frequencies.len().saturating_sub(1).max(1) as f64;
        let scaled = |(pair, frequency): (usize, &f64)| frequency * growth.powf(-(pair as f64) / last);
        frequencies.iter().enumerate().map(scaled).collect()
    }
}

impl RotaryTable {
    /// Creates a table for `positions` positions. `frequencies` holds the angle per position of each of the `head_dim / 2` pairs. Cosines
    /// and sines, and therefore the rotated values, are multiplied by `amplitude`.
    ///
    /// # Errors
    /// If the device has no memory for the table.
    pub fn new(device: &Device, positions: usize, frequencies: &[f64], amplitude: f32) -> Result<Self> {
        RotaryTable::with_scaling(device, positions, frequencies.to_vec(), amplitude, None)
    }

    /// Creates a table whose frequencies depend on the number of positions. `frequencies` apply unchanged to tables of at most
    /// `scaling.original_positions` positions.
    ///
    /// # Errors
    /// If the device has no memory for the table.
    pub fn dynamic(
        device: &Device,
        positions: usize,
        frequencies: &[f64],
        scaling: DynamicScaling,
    ) -> Result<Self> {
        RotaryTable::with_scaling(device, positions, frequencies.to_vec(), 1.0, Some(scaling))
    }

    fn with_scaling(
        device: &Device,
        positions: usize,
        frequencies: Vec<f64>,
        amplitude: f32,
        scaling: Option<DynamicScaling>,
    ) -> Result<Self> {
        let shape = [positions, frequencies.len()].into();
        let mut cos = device.empty(shape, DType::F32, Category::Parameters)?;
        let mut sin = device.empty(shape, DType::F32, Category::Parameters)?;
        if device.is_counting() {
            return Ok(RotaryTable { cos, sin, frequencies, amplitude, scaling });
        }
        let scaled = scaling.map(|scaling| scaling.apply(&frequencies, positions));
        let angles = scaled.as_ref().unwrap_or(&frequencies);
        for (table, function) in [(&mut cos, f64::cos as fn(f64) -> f64), (&mut sin, f64::sin)] {
            device.fill(table.view_mut(), |values: &mut [f32]| {
                for (index, value) in values.iter_mut().enumerate() {
                    let (position, pair) = (index / angles.len(), index % angles.len());
                    *value = function(position as f64 * angles[pair]) as f32 * amplitude;
                }
                Ok::<_, DeviceError>(())
            })?;
        }
        Ok(RotaryTable { cos, sin, frequencies, amplitude, scaling })
    }

    /// Creates the same table for another number of positions.
    ///
    /// # Errors
    /// If the device has no memory for the table.
    pub fn with_positions(&self, device: &Device, positions: usize) -> Result<Self> {
        RotaryTable::with_scaling(device, positions, self.frequencies.clone(), self.amplitude, self.scaling)
    }

    pub(crate) fn at(&self, positions: Positions) -> Rotary<View<'_>> {
        Rotary { cos: self.cos.view(), sin: self.sin.view(), positions }
    }
}

/// The KV cache of one attention layer, for generation.
#[derive(Debug)]
pub struct KeyValueCache {
    keys: Tensor,
    values: Tensor,
    len: usize,
}

impl KeyValueCache {
    /// Creates an empty cache for `batch` sequences of up to `capacity` positions.
    ///
    /// # Errors
    /// If the device has no memory for the cache.
    pub fn new(device: &Device, batch: usize, capacity: usize, attention: &Attention) -> Result<Self> {
        let of_heads =
            |head_dim: usize| device.activation([batch, capacity, attention.num_kv_heads * head_dim]);
        let (keys, values) = (of_heads(attention.head_dim)?, of_heads(attention.value_dim)?);
        Ok(KeyValueCache { keys, values, len: 0 })
    }

    /// Returns the number of cached positions.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether no position is cached.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the maximum number of cached positions.
    pub fn capacity(&self) -> usize {
        self.keys.shape().dims()[1]
    }
}

/// Multi-head attention within sequences. The output is `[batch, seq_len, num_heads * value_dim]` in the tape's precision.
///
/// The input is either rows of query heads, key heads and value heads (`[batch, seq_len, qkv_cols]`); or queries (`[batch, seq_len,
/// num_heads * head_dim]`) and separate rows of key heads and value heads (`[batch, num_keys, num_kv_heads * (head_dim + value_dim)]`).
/// Optional u32 inputs hold the number of keys of each sequence that are not padding (`[batch]`), and the position at which the document of
/// each query begins (`[batch, seq_len]`): a causal query does not see earlier keys.
///
/// If ranks of the context axis shard the positions, they exchange positions for heads first (Ulysses), or pass keys and values around a
/// ring, or both. The input with the starts of documents must then cover the positions that the rank holds after the exchange.
#[derive(Debug, Clone)]
pub struct Attention {
    /// Number of query heads.
    pub num_heads: usize,
    /// Number of key-value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Dim of query heads and key heads.
    pub head_dim: usize,
    /// Dim of value heads and output heads.
    pub value_dim: usize,
    /// The mask, and how scores become weights.
    pub rule: AttentionRule,
    rotary: Option<Arc<RotaryTable>>,
    exchanges: Exchanges,
}

/// The operations that exchange positions for heads and back.
#[derive(Debug, Clone)]
struct Exchanges {
    qkv: Arc<ExchangeHeads>,
    queries: Arc<ExchangeHeads>,
    keys_values: Arc<ExchangeHeads>,
    output: Arc<ExchangeHeads>,
}

impl Attention {
    /// Creates an attention operation with the mask and scale of `rule` and heads of `head_dim` elements. `num_kv_heads` divides
    /// `num_heads`.
    pub fn new(num_heads: usize, num_kv_heads: usize, head_dim: usize, rule: AttentionRule) -> Self {
        Attention::with_value_dim([num_heads, num_kv_heads], [head_dim; 2], rule)
    }

    /// Like [`new`](Attention::new), with value heads and output heads of `value_dim` elements.
    pub fn with_value_dim(
        [num_heads, num_kv_heads]: [usize; 2],
        [head_dim, value_dim]: [usize; 2],
        rule: AttentionRule,
    ) -> Self {
        let exchange =
            |groups: &[HeadGroup], to_heads| Arc::new(ExchangeHeads { groups: groups.to_vec(), to_heads });
        let group = |num_heads, head_dim| HeadGroup { num_heads, head_dim };
        let queries = group(num_heads, head_dim);
        let [keys, values] = [head_dim, value_dim].map(|dim| group(num_kv_heads, dim));
        let exchanges = Exchanges {
            qkv: exchange(&[queries, keys, values], true),
            queries: exchange(&[queries], true),
            keys_values: exchange(&[keys, values], true),
            output: exchange(&[group(num_heads, value_dim)], false),
        };
        Attention { num_heads, num_kv_heads, head_dim, value_dim, rule, rotary: None, exchanges }
    }

    /// Sets a table with which queries and keys are rotated first. It must cover every position. Keys and values must then not be a
    /// separate input.
    pub fn with_rotary(self, rotary: Option<Arc<RotaryTable>>) -> Self {
        Attention { rotary, ..self }
    }

    /// Returns the table that rotates queries and keys.
    pub fn rotary(&self) -> Option<&Arc<RotaryTable>> {
        self.rotary.as_ref()
    }

    /// Returns the sizes of attention for inputs of these shapes. `queries` is the first input, which includes keys and values if
    /// `keys_values` is `None`.
    ///
    /// # Panics
    /// If a shape does not have three dims.
    pub fn shape(&self, queries: Shape, keys_values: Option<Shape>) -> AttentionShape {
        let &[batch, seq_len, _] = queries.dims() else {
            panic!("{queries:?} is not [batch, seq_len, cols]")
        };
        let num_keys = keys_values.map_or(seq_len, |shape| shape.dims()[1]);
        let Attention { num_heads, num_kv_heads, head_dim, value_dim, .. } = *self;
        AttentionShape { batch, seq_len, num_heads, num_kv_heads, head_dim, value_dim, num_keys }
    }

    /// Returns the sizes of this rank's attention, with its share of the heads.
    fn shape_of(&self, cx: &OperationContext<'_>, views: &AttentionInputs<View<'_>>) -> AttentionShape {
        let degree = cx.context_rank().heads.degree;
        let shape = self.shape(views.queries.shape(), views.keys_values.map(|view| view.shape()));
        let (num_heads, num_kv_heads) = (shape.num_heads / degree, shape.num_kv_heads / degree);
        AttentionShape { num_heads, num_kv_heads, ..shape }
    }
}

/// Assigns the operation's inputs by their dtypes and shapes.
fn assign_inputs<'a>(num_inputs: usize, input: impl Fn(usize) -> View<'a>) -> AttentionInputs<View<'a>> {
    let mut views = AttentionInputs::packed_qkv(input(0));
    for view in (1..num_inputs).map(input) {
        let place = match (view.dtype(), view.shape().dims().len()) {
            (DType::U32, 1) => &mut views.padding_starts,
            (DType::U32, _) => &mut views.document_starts,
            _ => &mut views.keys_values,
        };
        assert!(place.replace(view).is_none(), "attention is given the same twice: {:?}", view.shape());
    }
    views
}

impl Operation for Attention {
    declares! { inputs: 1..=4, reads_inputs: INPUT_HALF, reads_outputs: INPUT_HALF, accepts_sharded_positions }

    fn forward(&self, cx: &mut ForwardContext<'_>) -> Result<()> {
        let (num_inputs, dtype) = (cx.num_inputs(), cx.input(0).dtype());
        let views = assign_inputs(num_inputs, |index| cx.input(index));
        let (shape, is_separate) = (self.shape_of(cx, &views), views.keys_values.is_some());
        let rotated = match &self.rotary {
            Some(_) if is_separate => panic!("queries and keys are rotated where they lie together"),
            Some(rotary) => rotate(cx, shape, rotary)?,
            None => None,
        };
        let mut log_sums = cx.empty_to_save([shape.batch, shape.num_heads, shape.seq_len], DType::F32)?;
        let views = assign_inputs(num_inputs, |index| match (index, &rotated) {
            (0, Some(rotated)) => rotated.view(),
            _ => cx.input(index),
        });
        let y = match RingAttention::of(cx, shape, self.rule) {
            Some(ring) => ring.forward(cx, views, &mut log_sums)?,
            None => {
                let mut y = cx.empty([shape.batch, shape.seq_len, shape.output_cols()], dtype)?;
                cx.device().attention(views, shape, self.rule, y.view_mut(), log_sums.view_mut())?;
                y
            }
        };
        cx.save(log_sums);
        if let Some(rotated) = rotated {
            cx.save(rotated);
        }
        cx.output(y);
        Ok(())
    }

    fn backward_input(&self, cx: &mut BackwardContext<'_>) -> Result<()> {
        let views = assign_inputs(cx.num_inputs(), |index| match index {
            0 => cx.saved(1).unwrap_or_else(|| cx.input(0)),
            _ => cx.input(index),
        });
        let shape = self.shape_of(cx, &views);
        let log_sums = cx.saved(0).expect("forward has saved them");
        let output = AttentionOutput { y: cx.output(0), log_sums, dy: cx.grad() };
        let (mut d_queries, d_keys_values) = match RingAttention::of(cx, shape, self.rule) {
            Some(ring) => ring.backward(cx, views, output)?,
            None => {
                let like = |view: View<'_>| cx.empty(view.shape(), view.dtype());
                let mut d_queries = like(views.queries)?;
                let mut d_keys_values = views.keys_values.map(like).transpose()?;
                let d_keys_values_view = d_keys_values.as_mut().map(Tensor::view_mut);
                cx.device().attention_backward(
                    views,
                    shape,
                    self.rule,
                    output,
                    d_queries.view_mut(),
                    d_keys_values_view,
                )?;
                (d_queries, d_keys_values)
            }
        };
        if let Some(rotary) = &self.rotary {
            let positions = cx.positions_after_head_exchange(shape.seq_len);
            cx.device().rotary(d_queries.view_mut(), shape, rotary.at(positions), true);
        }
        cx.add_grad(0, d_queries)?;
        d_keys_values.map_or(Ok(()), |grad| cx.add_grad(1, grad))
    }

    fn head_exchange(&self, operand: InputOrOutput, num_float_inputs: usize) -> Option<Op> {
        let Exchanges { qkv: together, queries, keys_values, output } = &self.exchanges;
        Some(match (operand, num_float_inputs) {
            (InputOrOutput::Output, _) => output.into(),
            (InputOrOutput::Input(0), 1) => together.into(),
            (InputOrOutput::Input(0), _) => queries.into(),
            (InputOrOutput::Input(_), _) => keys_values.into(),
        })
    }
}

/// Rotates queries and keys in place, or returns a rotated copy if the input has another reader.
fn rotate(
    cx: &mut ForwardContext<'_>,
    shape: AttentionShape,
    rotary: &RotaryTable,
) -> Result<Option<Tensor>> {
    let (device, positions) = (cx.device().clone(), cx.positions_after_head_exchange(shape.seq_len));
    if let Some(qkv) = cx.input_mut(0) {
        device.rotary(qkv, shape, rotary.at(positions), false);
        return Ok(None);
    }
    let mut rotated = cx.copy_input(0)?;
    device.rotary(rotated.view_mut(), shape, rotary.at(positions), false);
    Ok(Some(rotated))
}

impl Recorder<'_> {
    /// Runs [`Attention`] for rows that follow the positions of `cache`, and appends their keys and values to it.
    ///
    /// # Errors
    /// If the device cannot allocate memory.
    ///
    /// # Panics
    /// If the tape records, if its precision is not f32, or if the cache is full.
    pub fn attention_cached(
        &mut self,
        attention: &Attention,
        qkv: Var,
        cache: &mut KeyValueCache,
    ) -> Result<Var> {
        let (tape, _) = self.unrecorded();
        let shape = attention.shape(tape.values[qkv.0].tensor().shape(), None);
        let sharding = tape.values[qkv.0].sharding;
        let mut qkv = tape.take_value(qkv.id());
        if let Some(rotary) = &attention.rotary {
            let positions = Positions::run(cache.len, shape.seq_len);
            tape.device.rotary(qkv.view_mut(), shape, rotary.at(positions), false);
        }
        let mut y = tape.device.activation([shape.batch, shape.seq_len, shape.output_cols()])?;
        let mut log_sums = tape.device.activation([shape.batch, shape.num_heads, shape.seq_len])?;
        let (capacity, len) = (cache.capacity(), cache.len);
        let (keys, values) = (cache.keys.view_mut(), cache.values.view_mut());
        let views = CacheViews { keys, values, capacity, len };
        let (y_view, log_sums) = (y.view_mut(), log_sums.view_mut());
        tape.device.attention_cached(qkv.view(), shape, attention.rule, views, y_view, log_sums)?;
        cache.len += shape.seq_len;
        let attended = tape.constant(y);
        tape.values[attended.0].sharding = sharding;
        Ok(attended)
    }
}
