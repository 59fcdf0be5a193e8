//! Attention and rotary positions on a device.

use super::{Device, DeviceError};
use crate::kernels::cpu::element::with_element;
use crate::kernels::{AttentionShape, CacheSpan, Rotary};
use crate::tensor::{View, ViewMut};

impl Device {
    /// Rotates query and key heads in place; `inverse` is the gradient.
    pub(crate) fn rotary(
        &self,
        mut qkv: ViewMut<'_>,
        shape: AttentionShape,
        rotary: Rotary<'_>,
        inverse: bool,
    ) {
        with_element!(qkv.dtype() => |T| self.cpu.rotary::<T>(qkv.elements(), shape, rotary, inverse));
    }

    /// Causal attention; `log_sums` is `batch x num_heads x seq_len`.
    ///
    /// # Errors
    /// If there is no scratch memory.
    pub(crate) fn attention(
        &self,
        qkv: View<'_>,
        shape: AttentionShape,
        mut y: ViewMut<'_>,
        mut log_sums: ViewMut<'_>,
    ) -> Result<(), DeviceError> {
        let log_sums = log_sums.f32s();
        // Two products of queries with the keys up to their own.
        self.count_operations(&[2, shape.rows(), shape.output_cols(), shape.seq_len.saturating_add(1)]);
        with_element!(qkv.dtype() => |T| {
            let mut scratch = self.activation([self.cpu.attention_scratch::<T>(shape, 0, false)])?;
            let mut scratch = scratch.view_mut();
            self.cpu.attention::<T>(qkv.elements(), shape, y.elements(), log_sums, scratch.f32s());
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
        shape: AttentionShape,
        cache: &mut CacheSpan<'_>,
        mut y: ViewMut<'_>,
        mut log_sums: ViewMut<'_>,
    ) -> Result<(), DeviceError> {
        let num_elements = self.cpu.attention_scratch::<f32>(shape, cache.len, false);
        let mut scratch = self.activation([num_elements])?;
        let mut scratch = scratch.view_mut();
        self.cpu.attention_cached(qkv.f32s(), shape, cache, y.f32s(), log_sums.f32s(), scratch.f32s());
        Ok(())
    }

    /// Gradient of [`Device::attention`] with respect to `qkv`.
    ///
    /// # Errors
    /// If there is no scratch memory.
    pub(crate) fn attention_backward(
        &self,
        qkv: View<'_>,
        shape: AttentionShape,
        (y, log_sums, dy): (View<'_>, View<'_>, View<'_>),
        mut d_qkv: ViewMut<'_>,
    ) -> Result<(), DeviceError> {
        with_element!(qkv.dtype() => |T| {
            let mut scratch = self.activation([self.cpu.attention_scratch::<T>(shape, 0, true)])?;
            let mut scratch = scratch.view_mut();
            let output = (y.elements(), log_sums.f32s(), dy.elements());
            self.cpu.attention_backward::<T>(qkv.elements(), shape, output, d_qkv.elements(), scratch.f32s());
        });
        Ok(())
    }
}
