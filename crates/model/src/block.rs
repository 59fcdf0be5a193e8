//! One transformer block: attention and feed-forward, each behind a normalisation and around a residual.

use std::sync::Arc;
use trireme_tensor::tape::{KeyValueCache, Linear, Norm, RotaryTable};
use trireme_tensor::{AttentionShape, DeviceError, ParameterSource, Tape, Var};

/// A pre-norm block; gpt2 and llama differ in what its parts are, not in how they are joined.
#[derive(Debug, Clone)]
pub(crate) struct Block {
    pub(crate) attention_norm: Norm,
    /// All query, key and value heads at once.
    pub(crate) qkv: Linear,
    pub(crate) attention_output: Linear,
    pub(crate) mlp_norm: Norm,
    /// Into the feed-forward width: what the activation reads.
    pub(crate) mlp_in: Linear,
    /// The activation, and back.
    pub(crate) mlp_out: Linear,
    pub(crate) num_heads: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) head_dim: usize,
}

impl Block {
    pub(crate) fn attention_shape(&self, batch: usize, seq_len: usize) -> AttentionShape {
        AttentionShape {
            batch,
            seq_len,
            num_heads: self.num_heads,
            num_kv_heads: self.num_kv_heads,
            head_dim: self.head_dim,
        }
    }

    /// In the order of forward.
    pub(crate) fn linear_layers(&self) -> [&Linear; 4] {
        [&self.qkv, &self.attention_output, &self.mlp_in, &self.mlp_out]
    }

    /// `x` is `[batch * seq_len, hidden]`; so is the result.
    pub(crate) fn forward(
        &self,
        tape: &mut Tape,
        parameters: &dyn ParameterSource,
        (batch, seq_len): (usize, usize),
        rotary: Option<&Arc<RotaryTable>>,
        x: Var,
        cache: Option<&mut KeyValueCache>,
    ) -> Result<Var, DeviceError> {
        let shape = self.attention_shape(batch, seq_len);
        let normed = tape.norm(parameters, &self.attention_norm, x)?;
        let qkv = tape.linear(parameters, &self.qkv, normed, None)?;
        let attended = match cache {
            None => tape.attention(shape, rotary, qkv)?,
            Some(cache) => tape.attention_cached(shape, rotary, qkv, cache)?,
        };
        let x = tape.linear(parameters, &self.attention_output, attended, Some(x))?;
        let normed = tape.norm(parameters, &self.mlp_norm, x)?;
        let inner = tape.linear(parameters, &self.mlp_in, normed, None)?;
        tape.linear(parameters, &self.mlp_out, inner, Some(x))
    }
}
