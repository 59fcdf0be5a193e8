use super::Cpu;
use crate::kernels::call::AttentionCall;
use crate::kernels::cpu::element::{Element, with_element};
use crate::kernels::{
    AttentionGrads, AttentionInputs, AttentionOutput, ForwardResults, LayerKvCache, Operand, RowDestination,
    SharedSlice,
};

impl Cpu {
    fn inputs<T: Element>(&self, inputs: AttentionInputs<Operand>) -> AttentionInputs<&[T], &[u32]> {
        inputs.map(|floats| floats.elements(self), |integers| integers.u32s(self))
    }

    fn output<T: Element>(&self, output: AttentionOutput<Operand>) -> AttentionOutput<&[T], &[f32]> {
        let AttentionOutput { y, log_sums, dy } = output;
        AttentionOutput { y: y.elements(self), log_sums: log_sums.f32s(self), dy: dy.elements(self) }
    }

    pub(super) fn run_attention(&self, call: AttentionCall) {
        match call {
            AttentionCall::Rotary { mut qkv, rotary, shape, inverse } => {
                let rotary = rotary.map(|angles| angles.f32s(self));
                with_element!(qkv.dtype() => |T| {
                    self.rotary::<T>(qkv.elements(self), shape, rotary, inverse);
                });
            }
            AttentionCall::LatentHeads { inputs, rotary, mut qkv, shape } => {
                let (rotary, seq_len) = (rotary.map(|angles| angles.f32s(self)), qkv.shape().dims()[1]);
                with_element!(qkv.dtype() => |T| {
                    let inputs = inputs.map(|input| input.elements(self));
                    self.latent_heads::<T>(shape, inputs, rotary, seq_len, qkv.elements(self));
                });
            }
            AttentionCall::LatentHeadsBackward { grad, rotary, mut grads, shape } => {
                let (rotary, seq_len) = (rotary.map(|angles| angles.f32s(self)), grad.shape().dims()[1]);
                with_element!(grad.dtype() => |T| {
                    let grads = grads.each_mut().map(|grad| grad.elements(self));
                    self.latent_heads_backward::<T>(shape, grad.elements(self), rotary, seq_len, grads);
                });
            }
            AttentionCall::Attention { inputs, mut y, mut log_sums, mut scratch, shape, scope } => {
                let (log_sums, scratch) = (log_sums.f32s(self), scratch.f32s(self));
                with_element!(inputs.queries.dtype() => |T| {
                    let y = RowDestination::Elements(SharedSlice::new(y.elements(self)));
                    let results = ForwardResults { y, log_sums };
                    self.attention::<T>(self.inputs(inputs), shape, scope, results, scratch);
                });
            }
            AttentionCall::AttentionBlock { inputs, mut y, mut log_sums, mut scratch, shape, scope } => {
                let (log_sums, scratch) = (log_sums.f32s(self), scratch.f32s(self));
                let y = y.f32s(self);
                with_element!(inputs.queries.dtype() => |T| {
                    let y = RowDestination::Sums(SharedSlice::new(y));
                    let results = ForwardResults { y, log_sums };
                    self.attention::<T>(self.inputs(inputs), shape, scope, results, scratch);
                });
            }
            AttentionCall::AttentionCached {
                qkv,
                mut keys,
                mut values,
                mut y,
                mut log_sums,
                mut scratch,
                shape,
                rule,
                capacity,
                len,
            } => {
                let mut cache =
                    LayerKvCache { keys: keys.f32s(self), values: values.f32s(self), capacity, len };
                let y = RowDestination::Elements(SharedSlice::new(y.f32s(self)));
                let results = ForwardResults { y, log_sums: log_sums.f32s(self) };
                let scratch = scratch.f32s(self);
                self.attention_cached(qkv.f32s(self), shape, rule, &mut cache, results, scratch);
            }
            AttentionCall::AttentionBackward {
                inputs,
                output,
                mut d_queries,
                mut d_keys_values,
                mut scratch,
                shape,
                scope,
            } => {
                let scratch = scratch.f32s(self);
                with_element!(inputs.queries.dtype() => |T| {
                    let queries = RowDestination::Elements(SharedSlice::new(d_queries.elements(self)));
                    let keys_values =
                        d_keys_values.as_mut().map(|grad| RowDestination::Elements(SharedSlice::new(grad.elements(self))));
                    let (inputs, output) = (self.inputs(inputs), self.output(output));
                    let grads = AttentionGrads { queries, keys_values };
                    self.attention_backward::<T>(inputs, shape, scope, output, grads, scratch);
                });
            }
            AttentionCall::AttentionBlockBackward {
                inputs,
                output,
                mut d_queries,
                mut d_keys_values,
                mut scratch,
                shape,
                scope,
            } => {
                let scratch = scratch.f32s(self);
                let (d_queries, d_keys_values) = (d_queries.f32s(self), d_keys_values.f32s(self));
                with_element!(inputs.queries.dtype() => |T| {
                    let queries = RowDestination::Sums(SharedSlice::new(d_queries));
                    let keys_values = Some(RowDestination::Sums(SharedSlice::new(d_keys_values)));
                    let (inputs, output) = (self.inputs(inputs), self.output(output));
                    let grads = AttentionGrads { queries, keys_values };
                    self.attention_backward::<T>(inputs, shape, scope, output, grads, scratch);
                });
            }
        }
    }
}
