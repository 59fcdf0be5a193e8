use super::{Backward, Node, Tape, Var};
use crate::device::{Device, DeviceError};
use crate::kernels::{AttentionShape, CacheSpan, Rotary};
use crate::tensor::Tensor;
use std::sync::Arc;
use trireme_base::{Category, DType};

/// Cosines and sines for every position of a rotary embedding, `[positions, head_dim / 2]` each.
#[derive(Debug)]
pub struct RotaryTable {
    cos: Tensor,
    sin: Tensor,
}

impl RotaryTable {
    /// The table for `positions`; `frequencies` holds the angle per position of each of the `head_dim / 2` pairs.
    pub fn new(device: &Device, positions: usize, frequencies: &[f64]) -> Result<Self, DeviceError> {
        let shape = [positions, frequencies.len()].into();
        let mut cos = device.empty(shape, DType::F32, Category::Parameters)?;
        let mut sin = device.empty(shape, DType::F32, Category::Parameters)?;
        if device.is_counting() {
            return Ok(RotaryTable { cos, sin });
        }
        let (mut cos_view, mut sin_view) = (cos.view_mut(), sin.view_mut());
        let pairs = cos_view.f32s().iter_mut().zip(sin_view.f32s());
        for (index, (cos, sin)) in pairs.enumerate() {
            let (position, pair) = (index / frequencies.len(), index % frequencies.len());
            let angle = position as f64 * frequencies[pair];
            (*cos, *sin) = (angle.cos() as f32, angle.sin() as f32);
        }
        Ok(RotaryTable { cos, sin })
    }

    pub(crate) fn at(&self, first_position: usize) -> Rotary<'_> {
        Rotary { cos: self.cos.view().f32s(), sin: self.sin.view().f32s(), first_position }
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

#[derive(Debug)]
pub(super) struct AttentionNode {
    shape: AttentionShape,
    rotary: Option<Arc<RotaryTable>>,
    /// Rotated in place.
    qkv: Var,
    y: Var,
    pub(super) log_sums: Tensor,
}

impl Tape {
    /// Causal attention over `qkv` (`[batch * seq_len, qkv_cols]`, in the tape's precision); `[batch * seq_len, output_cols]`,
    /// likewise. With a
    /// rotary table, queries and keys are rotated first, in place: no other operation may read `qkv`.
    pub fn attention(
        &mut self,
        shape: AttentionShape,
        rotary: Option<&Arc<RotaryTable>>,
        qkv: Var,
    ) -> Result<Var, DeviceError> {
        self.rotate(shape, rotary, qkv, 0);
        let dtype = self.values.get(qkv).dtype();
        let mut y = self.device.activation_of([shape.rows(), shape.output_cols()], dtype)?;
        let mut log_sums = self.device.activation([shape.batch, shape.num_heads, shape.seq_len])?;
        self.device.attention(self.values.get(qkv), shape, y.view_mut(), log_sums.view_mut())?;
        let y = self.input(y);
        self.record(|| Node::Attention(AttentionNode { shape, rotary: rotary.cloned(), qkv, y, log_sums }));
        Ok(y)
    }

    /// As [`Tape::attention`] for rows that follow the positions of `cache`, which takes them in.
    ///
    /// # Panics
    /// If the tape records, its precision is not f32, or the cache is full.
    pub fn attention_cached(
        &mut self,
        shape: AttentionShape,
        rotary: Option<&Arc<RotaryTable>>,
        qkv: Var,
        cache: &mut KeyValueCache,
    ) -> Result<Var, DeviceError> {
        assert_eq!(self.recording, super::Recording::Off, "a cache is for forward only");
        self.rotate(shape, rotary, qkv, cache.len);
        let mut y = self.device.activation([shape.rows(), shape.output_cols()])?;
        let mut log_sums = self.device.activation([shape.batch, shape.num_heads, shape.seq_len])?;
        let capacity = cache.capacity();
        let (mut keys, mut values) = (cache.keys.view_mut(), cache.values.view_mut());
        let mut span = CacheSpan { keys: keys.f32s(), values: values.f32s(), capacity, len: cache.len };
        self.device.attention_cached(
            self.values.get(qkv),
            shape,
            &mut span,
            y.view_mut(),
            log_sums.view_mut(),
        )?;
        cache.len += shape.seq_len;
        Ok(self.input(y))
    }

    fn rotate(
        &mut self,
        shape: AttentionShape,
        rotary: Option<&Arc<RotaryTable>>,
        qkv: Var,
        first_position: usize,
    ) {
        let Some(rotary) = rotary else { return };
        self.device.rotary(self.values.get_mut(qkv), shape, rotary.at(first_position), false);
    }
}

impl AttentionNode {
    /// Attention has no parameters: all of this is the input half.
    pub(super) fn backward(self, cx: &mut Backward<'_>) -> Result<Var, DeviceError> {
        let dy = cx.take_grad(self.y);
        let qkv = cx.values.get(self.qkv);
        let mut d_qkv = cx.device.activation_of(qkv.shape(), qkv.dtype())?;
        let output = (cx.values.get(self.y), self.log_sums.view(), dy.view());
        cx.device.attention_backward(qkv, self.shape, output, d_qkv.view_mut())?;
        if let Some(rotary) = &self.rotary {
            cx.device.rotary(d_qkv.view_mut(), self.shape, rotary.at(0), true);
        }
        cx.add_grad(self.qkv, d_qkv);
        Ok(self.y)
    }
}
