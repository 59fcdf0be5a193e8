//! Attention and rotary embeddings.

use super::{Operands, Replace, array_structs, kernel_calls, num_bytes, plain_arguments};
use crate::kernels::{
    AttentionInputs, AttentionOutput, AttentionRule, AttentionScope, AttentionShape, LatentHeadShape,
    Operand, OperandMut, Rotary,
};
use crate::shape::Shape;
use crate::view::{View, ViewMut};
use trireme_base::Cost;

kernel_calls! {
    /// Attention and rotary embeddings.
    AttentionCall {
        /// Rotates the query and key heads at the start of each row of `qkv` in place. `inverse` computes the gradient.
        pub(crate) fn rotary => Rotary { qkv: ViewMut, shape: AttentionShape, rotary: Rotary<View>, inverse: bool }

        /// Assembles the `qkv` rows of latent attention from `inputs`: `[queries, keys_values, shared_key]` (see
        /// [`LatentHeads`](crate::tape::LatentHeads)).
        pub(crate) fn latent_heads => LatentHeads {
            shape: LatentHeadShape, inputs: [View; 3], rotary: Rotary<View>, qkv: ViewMut
        }

        /// Computes the gradients of the inputs of [`latent_heads`](crate::Device::latent_heads).
        pub(crate) fn latent_heads_backward => LatentHeadsBackward {
            shape: LatentHeadShape, grad: View, rotary: Rotary<View>, grads: [ViewMut; 3]
        }
    }
    {
        attention => Attention {
            inputs: AttentionInputs<View>, y: ViewMut, log_sums: ViewMut, scratch: ViewMut,
            shape: AttentionShape, scope: AttentionScope
        }
        attention_block => AttentionBlock {
            inputs: AttentionInputs<View>, y: ViewMut, log_sums: ViewMut, scratch: ViewMut,
            shape: AttentionShape, scope: AttentionScope
        }
        /// Attention with a KV cache that has room for `capacity` positions and holds `len`.
        attention_cached => AttentionCached {
            qkv: View, keys: ViewMut, values: ViewMut, y: ViewMut, log_sums: ViewMut, scratch: ViewMut,
            shape: AttentionShape, rule: AttentionRule, capacity: usize, len: usize
        }
        attention_backward => AttentionBackward {
            inputs: AttentionInputs<View>, output: AttentionOutput<View>, d_queries: ViewMut, d_keys_values: Option<ViewMut>,
            scratch: ViewMut, shape: AttentionShape, scope: AttentionScope
        }
        attention_block_backward => AttentionBlockBackward {
            inputs: AttentionInputs<View>, output: AttentionOutput<View>, d_queries: ViewMut, d_keys_values: ViewMut,
            scratch: ViewMut, shape: AttentionShape, scope: AttentionScope
        }
    }
}

plain_arguments! { AttentionRule, AttentionScope, AttentionShape, LatentHeadShape }

array_structs!(AttentionOutput, Rotary);

impl AttentionCall {
    pub(crate) fn cost(&self) -> Cost {
        match self {
            Self::Rotary { qkv, shape, .. } => {
                let num_heads = shape.num_heads + shape.num_kv_heads;
                let num_rotated = shape.rows().saturating_mul(num_heads.saturating_mul(shape.head_dim));
                Cost::others(&[3, num_rotated]).updates(num_rotated.saturating_mul(qkv.dtype().size()))
            }
            Self::LatentHeads { inputs, qkv, shape, .. } => {
                let read = inputs.iter().map(Operand::num_bytes).sum();
                latent_cost(*shape, qkv.shape()).reads(read).writes(qkv.num_bytes())
            }
            Self::LatentHeadsBackward { grad, grads, shape, .. } => {
                let written = grads.iter().map(OperandMut::num_bytes).sum();
                latent_cost(*shape, grad.shape()).reads(grad.num_bytes()).writes(written)
            }
            Self::Attention { inputs, y, log_sums, shape, scope, .. } => {
                let cost = forward_cost(*shape, scope.num_pairs()).reads(inputs.num_bytes());
                cost.writes(y.num_bytes()).writes(log_sums.num_bytes())
            }
            Self::AttentionBlock { inputs, y, log_sums, shape, scope, .. } => {
                let cost = forward_cost(*shape, scope.num_pairs()).reads(inputs.num_bytes());
                cost.updates(y.num_bytes()).updates(log_sums.num_bytes())
            }
            Self::AttentionCached { qkv, y, log_sums, shape, rule, len, .. } => {
                let num_pairs = AttentionScope::after(*len, *shape, *rule).num_pairs();
                let of_positions = |num: usize| shape.batch * num * shape.kv_cols() * size_of::<f32>();
                let cost = forward_cost(*shape, num_pairs).reads(qkv.num_bytes() + of_positions(*len));
                cost.writes(y.num_bytes() + log_sums.num_bytes() + of_positions(shape.seq_len))
            }
            Self::AttentionBackward { inputs, output, d_queries, d_keys_values, shape, scope, .. } => {
                let written = d_queries.num_bytes() + d_keys_values.as_ref().map_or(0, OperandMut::num_bytes);
                let cost = backward_cost(*shape, scope.num_pairs());
                cost.reads(inputs.num_bytes()).reads(output.num_bytes()).writes(written)
            }
            Self::AttentionBlockBackward {
                inputs, output, d_queries, d_keys_values, shape, scope, ..
            } => {
                let updated = d_queries.num_bytes() + d_keys_values.num_bytes();
                let cost = backward_cost(*shape, scope.num_pairs());
                cost.reads(inputs.num_bytes()).reads(output.num_bytes()).updates(updated)
            }
        }
    }
}

/// Returns the operations that rotate the rotary parts of all heads, without memory traffic.
fn latent_cost(shape: LatentHeadShape, qkv: Shape) -> Cost {
    Cost::others(&[3, qkv.rows(), (shape.num_heads + 1) * shape.rotary_dim])
}

/// Returns the operations of the two matmuls and the softmax between them, without memory traffic.
fn forward_cost(shape: AttentionShape, num_pairs: usize) -> Cost {
    Cost::products(&[2, shape.batch, shape.query_cols() + shape.output_cols(), num_pairs])
        + Cost::others(&[Cost::EXP + 4, shape.batch, shape.num_heads, num_pairs])
}

/// Returns the operations of five matmuls (the recomputed scores, and the gradients of attention weights, values, queries and keys),
/// without memory traffic.
fn backward_cost(shape: AttentionShape, num_pairs: usize) -> Cost {
    Cost::products(&[2, shape.batch, 3 * shape.query_cols() + 2 * shape.output_cols(), num_pairs])
        .recomputes(&[2, shape.batch, shape.query_cols(), num_pairs])
        + Cost::others(&[Cost::EXP + 5, shape.batch, shape.num_heads, num_pairs])
}

impl AttentionInputs<Operand> {
    fn num_bytes(&self) -> usize {
        let AttentionInputs { queries, keys_values, padding_starts, document_starts } = self;
        queries.num_bytes()
            + [keys_values, padding_starts, document_starts].map(num_bytes).iter().sum::<usize>()
    }
}

impl AttentionOutput<Operand> {
    fn num_bytes(&self) -> usize {
        self.y.num_bytes() + self.log_sums.num_bytes() + self.dy.num_bytes()
    }
}

impl Operands for AttentionInputs<Operand> {
    fn with_operands(&self, replace: &mut Replace<'_>) -> Self {
        AttentionInputs {
            queries: self.queries.with_operands(replace),
            keys_values: self.keys_values.with_operands(replace),
            padding_starts: self.padding_starts.with_operands(replace),
            document_starts: self.document_starts.with_operands(replace),
        }
    }
}
