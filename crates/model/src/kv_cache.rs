//! The KV cache of a sequence that is being generated.

use crate::bundle::Bundle;
use std::sync::Arc;
use trireme_tensor::tape::{Attention, KeyValueCache, Recorder, RotaryTable};
use trireme_tensor::{Category, Device, DeviceError, Tensor, Var};

/// A KV cache: keys and values of every attention layer at earlier positions of one sequence.
#[derive(Debug)]
pub struct KvCache {
    device: Device,
    capacity: usize,
    position: usize,
    /// One for each attention layer, in order of use.
    caches: Vec<KeyValueCache>,
    next_layer: usize,
    /// Pairs of a model's rotary table and the same table for all positions of the sequence.
    tables: Vec<(Arc<RotaryTable>, Arc<RotaryTable>)>,
}

impl KvCache {
    /// Creates an empty cache for a sequence of at most `capacity` tokens. Memory is allocated when an attention layer first runs.
    pub fn new(device: &Device, capacity: usize) -> Self {
        let (caches, tables) = (Vec::new(), Vec::new());
        KvCache { device: device.clone(), capacity, position: 0, caches, next_layer: 0, tables }
    }

    /// Returns the number of tokens in the cache.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Records that a pass over the full model has read `num_tokens`.
    pub fn advance(&mut self, num_tokens: usize) {
        self.position += num_tokens;
        self.next_layer = 0;
    }

    /// Reduces each input of the last unit to its last row, `[1, 1, cols]`, because only the logits of the last position are needed to
    /// choose the next token.
    ///
    /// # Errors
    /// If the device cannot allocate memory.
    pub fn keep_last_rows(&self, inputs: &mut Bundle<Tensor>) -> Result<(), DeviceError> {
        for tensor in inputs.values_mut() {
            let (shape, dtype) = (tensor.shape(), tensor.dtype());
            let mut last = self.device.empty([1, 1, shape.cols()].into(), dtype, Category::Activations)?;
            self.device.copy(tensor.view().rows(shape.rows() - 1, 1), last.view_mut().rows(0, 1));
            *tensor = last;
        }
        Ok(())
    }

    /// Computes attention over the cached positions and `qkv`, whose keys and values are added to the cache.
    pub(crate) fn attention(
        &mut self,
        recorder: &mut Recorder<'_>,
        attention: &Attention,
        qkv: Var,
    ) -> Result<Var, DeviceError> {
        if self.next_layer == self.caches.len() {
            self.caches.push(KeyValueCache::new(&self.device, 1, self.capacity, attention)?);
        }
        let rotary = attention.rotary().map(|table| self.full_table(table)).transpose()?;
        let cache = &mut self.caches[self.next_layer];
        self.next_layer += 1;
        recorder.attention_cached(&attention.clone().with_rotary(rotary), qkv, cache)
    }

    /// Returns a model's rotary table for all positions of the sequence.
    pub(crate) fn full_table(&mut self, table: &Arc<RotaryTable>) -> Result<Arc<RotaryTable>, DeviceError> {
        if let Some((_, whole)) = self.tables.iter().find(|(own, _)| Arc::ptr_eq(own, table)) {
            return Ok(Arc::clone(whole));
        }
        let whole = Arc::new(table.with_positions(&self.device, self.capacity)?);
        self.tables.push((Arc::clone(table), Arc::clone(&whole)));
        Ok(whole)
    }
}
