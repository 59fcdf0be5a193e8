//! One transformer block: attention and feed-forward, each behind a normalisation and around a residual.

use std::sync::Arc;
use trireme_tensor::tape::{Attention, KeyValueCache, Linear, Norm, Recorder, RotaryTable};
use trireme_tensor::{DeviceError, Var};

/// A pre-norm block; gpt2 and llama differ in what its parts are, not in how they are joined.
#[derive(Debug, Clone)]
pub(crate) struct Block {
    pub(crate) attention_norm: Arc<Norm>,
    /// All query, key and value heads at once.
    pub(crate) qkv: Arc<Linear>,
    pub(crate) attention: Arc<Attention>,
    pub(crate) attention_output: Arc<Linear>,
    pub(crate) mlp_norm: Arc<Norm>,
    /// Into the feed-forward width: what the activation reads.
    pub(crate) mlp_in: Arc<Linear>,
    /// The activation, and back.
    pub(crate) mlp_out: Arc<Linear>,
}

/// What a block has seen before the tokens of a forward pass.
#[derive(Debug)]
pub(crate) struct Past<'a> {
    /// Table of all positions up to the last token's (llama).
    pub(crate) rotary: Option<&'a Arc<RotaryTable>>,
    /// Keys and values at earlier positions.
    pub(crate) cache: &'a mut KeyValueCache,
}

impl Block {
    /// In the order of forward.
    pub(crate) fn linear_layers(&self) -> [&Linear; 4] {
        [&self.qkv, &self.attention_output, &self.mlp_in, &self.mlp_out]
    }

    /// `x` is `[batch, seq_len, hidden]`; so is the result.
    pub(crate) fn forward(
        &self,
        recorder: &mut Recorder<'_>,
        x: Var,
        past: Option<Past<'_>>,
    ) -> Result<Var, DeviceError> {
        let normed = recorder.apply(&self.attention_norm, [&x])?;
        let qkv = recorder.apply(&self.qkv, [normed])?;
        let attended = match past {
            None => recorder.apply(&self.attention, [qkv])?,
            Some(Past { rotary, cache }) => {
                let attention = Attention { rotary: rotary.cloned(), ..*self.attention };
                recorder.attention_cached(&attention, qkv, cache)?
            }
        };
        let x = recorder.apply(&self.attention_output, (attended, x))?;
        let normed = recorder.apply(&self.mlp_norm, [&x])?;
        let inner = recorder.apply(&self.mlp_in, [normed])?;
        recorder.apply(&self.mlp_out, (inner, x))
    }
}
