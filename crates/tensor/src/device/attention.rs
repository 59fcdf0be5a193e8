//! Attention kernels.

use super::{Device, Result};
use crate::kernels::call::AttentionCall;
use crate::kernels::cpu::element::with_element;
use crate::kernels::cuda::attention_scratch;
use crate::kernels::{
    AttentionInputs, AttentionOutput, AttentionRule, AttentionScope, AttentionShape, Operand,
};
use crate::tensor::Tensor;
use crate::view::{View, ViewMut};
use trireme_base::DType;

impl Device {
    /// Computes attention. Rows are the positions of `batch` sequences; `y` is `[rows, output_cols]`, `log_sums` is `[batch, num_heads,
    /// seq_len]`.
    ///
    /// Fails if there is no scratch memory.
    pub(crate) fn attention(
        &self,
        inputs: AttentionInputs<View<'_>>,
        shape: AttentionShape,
        rule: AttentionRule,
        y: ViewMut<'_>,
        log_sums: ViewMut<'_>,
    ) -> Result<()> {
        let dtype = inputs.queries.dtype();
        assert_eq!(y.dtype(), dtype);
        let mut scratch = self.attention_scratch(dtype, shape, 0, false)?;
        let (inputs, scope) = (operands(inputs), AttentionScope::whole(shape, rule));
        let [y, log_sums, scratch] = [y, log_sums, scratch.view_mut()].map(ViewMut::into_operand);
        self.issue(AttentionCall::Attention { inputs, y, log_sums, scratch, shape, scope });
        Ok(())
    }

    /// Adds a block of keys to attention. `y`, in f32, and `log_sums`, shaped as in [`Device::attention`], hold the results for earlier
    /// keys, or zeros and negative infinity before the first block. After the last block, the results equal the results of attention except
    /// for rounding, because terms are summed in another order.
    ///
    /// Fails if there is no scratch memory.
    pub(crate) fn attention_block(
        &self,
        inputs: AttentionInputs<View<'_>>,
        shape: AttentionShape,
        scope: AttentionScope,
        y: ViewMut<'_>,
        log_sums: ViewMut<'_>,
    ) -> Result<()> {
        let mut scratch = self.attention_scratch(inputs.queries.dtype(), shape, 0, false)?;
        let inputs = operands(inputs);
        let [y, log_sums, scratch] = [y, log_sums, scratch.view_mut()].map(ViewMut::into_operand);
        self.issue(AttentionCall::AttentionBlock { inputs, y, log_sums, scratch, shape, scope });
        Ok(())
    }

    /// Allocates scratch memory for attention after `num_earlier` cached positions.
    fn attention_scratch(
        &self,
        dtype: DType,
        shape: AttentionShape,
        num_earlier: usize,
        backward: bool,
    ) -> Result<Tensor> {
        if self.is_gpu {
            return self.activation([attention_scratch(shape, backward)]);
        }
        let len = with_element!(dtype => |T| self.cpu.attention_scratch::<T>(shape, num_earlier, backward));
        self.activation([len])
    }

    /// Computes causal attention with a KV cache and appends the new keys and values to the cache. Cached keys are `[batch, capacity,
    /// key_cols]`, values are `[batch, capacity, value_cols]`, and `y` is `[rows, output_cols]`, all in f32.
    ///
    /// Fails if there is no scratch memory.
    pub(crate) fn attention_cached(
        &self,
        qkv: View<'_>,
        shape: AttentionShape,
        rule: AttentionRule,
        cache: CacheViews<'_>,
        y: ViewMut<'_>,
        log_sums: ViewMut<'_>,
    ) -> Result<()> {
        let CacheViews { keys, values, capacity, len } = cache;
        let mut scratch = self.attention_scratch(DType::F32, shape, len, false)?;
        self.issue(AttentionCall::AttentionCached {
            qkv: qkv.operand(),
            keys: keys.into_operand(),
            values: values.into_operand(),
            y: y.into_operand(),
            log_sums: log_sums.into_operand(),
            scratch: scratch.view_mut().into_operand(),
            shape,
            rule,
            capacity,
            len,
        });
        Ok(())
    }

    /// Computes the gradient of [`Device::attention`] with respect to the queries, and with respect to keys and values if they are stored
    /// separately. Each gradient has the shape of its input.
    ///
    /// Fails if there is no scratch memory.
    pub(crate) fn attention_backward(
        &self,
        inputs: AttentionInputs<View<'_>>,
        shape: AttentionShape,
        rule: AttentionRule,
        output: AttentionOutput<View<'_>>,
        d_queries: ViewMut<'_>,
        d_keys_values: Option<ViewMut<'_>>,
    ) -> Result<()> {
        let dtype = inputs.queries.dtype();
        assert_eq!(d_queries.dtype(), dtype);
        let mut scratch = self.attention_scratch(dtype, shape, 0, true)?;
        self.issue(AttentionCall::AttentionBackward {
            inputs: operands(inputs),
            output: output.map(View::operand),
            d_queries: d_queries.into_operand(),
            d_keys_values: d_keys_values.map(ViewMut::into_operand),
            scratch: scratch.view_mut().into_operand(),
            shape,
            scope: AttentionScope::whole(shape, rule),
        });
        Ok(())
    }

    /// Adds the gradients of [`Device::attention_block`] with respect to queries, keys and values, in f32. `output` is the output over all
    /// keys.
    ///
    /// Fails if there is no scratch memory.
    pub(crate) fn attention_block_backward(
        &self,
        inputs: AttentionInputs<View<'_>>,
        shape: AttentionShape,
        scope: AttentionScope,
        output: AttentionOutput<View<'_>>,
        d_queries: ViewMut<'_>,
        d_keys_values: ViewMut<'_>,
    ) -> Result<()> {
        let mut scratch = self.attention_scratch(inputs.queries.dtype(), shape, 0, true)?;
        self.issue(AttentionCall::AttentionBlockBackward {
            inputs: operands(inputs),
            output: output.map(View::operand),
            d_queries: d_queries.into_operand(),
            d_keys_values: d_keys_values.into_operand(),
            scratch: scratch.view_mut().into_operand(),
            shape,
            scope,
        });
        Ok(())
    }
}

fn operands(inputs: AttentionInputs<View<'_>>) -> AttentionInputs<Operand> {
    inputs.map(View::operand, View::operand)
}

/// Views of a KV cache: keys `[batch, capacity, key_cols]` and values `[batch, capacity, value_cols]`.
#[derive(Debug)]
pub(crate) struct CacheViews<'a> {
    pub(crate) keys: ViewMut<'a>,
    pub(crate) values: ViewMut<'a>,
    pub(crate) capacity: usize,
    /// Number of cached positions.
    pub(crate) len: usize,
}
