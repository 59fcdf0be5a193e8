//! What was read of a sequence before.

use crate::bundle::Bundle;
use std::sync::Arc;
use trireme_tensor::tape::{Attention, KeyValueCache, Recorder, RotaryTable};
use trireme_tensor::{Category, Device, DeviceError, Tensor, Var};

/// Keys and values of each attention at earlier positions of one sequence.
#[derive(Debug)]
pub struct Past {
    device: Device,
    capacity: usize,
    position: usize,
    /// In the order of use.
    caches: Vec<KeyValueCache>,
    next: usize,
    /// Rotary tables of the model, each with one for all positions of the sequence.
    tables: Vec<(Arc<RotaryTable>, Arc<RotaryTable>)>,
}

impl Past {
    /// Of a sequence of at most `capacity` tokens.
    pub fn new(device: &Device, capacity: usize) -> Self {
        let (caches, tables) = (Vec::new(), Vec::new());
        Past { device: device.clone(), capacity, position: 0, caches, next: 0, tables }
    }

    /// Number of tokens read.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Ends a pass over the whole model that has read `num_tokens`.
    pub fn advance(&mut self, num_tokens: usize) {
        self.position += num_tokens;
        self.next = 0;
    }

    /// Keeps the last row of what the last unit reads: only the last position is continued.
    ///
    /// # Errors
    /// If the device has no memory for it.
    pub fn keep_last_rows(&self, inputs: &mut Bundle<Tensor>) -> Result<(), DeviceError> {
        for tensor in inputs.values_mut() {
            let (shape, dtype) = (tensor.shape(), tensor.dtype());
            let mut last = self.device.empty([1, 1, shape.cols()].into(), dtype, Category::Activations)?;
            self.device.copy(tensor.view().rows(shape.rows() - 1, 1), last.view_mut().rows(0, 1));
            *tensor = last;
        }
        Ok(())
    }

    /// Attention over what was read before and `qkv`, which is remembered.
    pub(crate) fn attention(
        &mut self,
        recorder: &mut Recorder<'_>,
        attention: &Attention,
        qkv: Var,
    ) -> Result<Var, DeviceError> {
        if self.next == self.caches.len() {
            self.caches.push(KeyValueCache::new(&self.device, 1, self.capacity, attention)?);
        }
        let rotary = attention.rotary().map(|table| self.whole_table(table)).transpose()?;
        let cache = &mut self.caches[self.next];
        self.next += 1;
        recorder.attention_cached(&attention.clone().with_rotary(rotary), qkv, cache)
    }

    /// A model's table, for all positions of the sequence.
    pub(crate) fn whole_table(&mut self, table: &Arc<RotaryTable>) -> Result<Arc<RotaryTable>, DeviceError> {
        if let Some((_, whole)) = self.tables.iter().find(|(own, _)| Arc::ptr_eq(own, table)) {
            return Ok(Arc::clone(whole));
        }
        let whole = Arc::new(table.with_positions(&self.device, self.capacity)?);
        self.tables.push((Arc::clone(table), Arc::clone(&whole)));
        Ok(whole)
    }
}
