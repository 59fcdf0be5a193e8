//! The units of a transformer that predicts tokens.

use crate::tokens::{TARGETS, TOKENS};
use crate::unit::{Pass, Unit};
use std::sync::Arc;
use trireme_tensor::DeviceError;
use trireme_tensor::tape::{Attention, Embedding, Linear, LossHead, Norm};

/// Name of the residual stream between units: `[batch, seq_len, hidden]`, f32.
const HIDDEN: &str = "hidden";

/// Name of what the head passes on of a batch without targets: `[batch, seq_len, vocabulary]`, f32.
pub(crate) const LOGITS: &str = "logits";

/// From tokens to the residual stream.
#[derive(Debug)]
pub(crate) struct TokenEmbedding(pub(crate) Arc<Embedding>);

impl Unit for TokenEmbedding {
    fn forward(&self, pass: &mut Pass<'_>) -> Result<(), DeviceError> {
        let tokens = pass.batch(TOKENS);
        let x = pass.apply(&self.0, [tokens])?;
        pass.output(HIDDEN, x);
        Ok(())
    }
}

/// A pre-norm block: attention and feed-forward, each behind a normalisation and around a residual. Families differ in what its
/// parts are, not in how they are joined.
#[derive(Debug)]
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

impl Unit for Block {
    fn forward(&self, pass: &mut Pass<'_>) -> Result<(), DeviceError> {
        let x = pass.input(HIDDEN);
        let normed = pass.apply(&self.attention_norm, [&x])?;
        let qkv = pass.apply(&self.qkv, [normed])?;
        let attended = pass.attention(&self.attention, qkv)?;
        let x = pass.apply(&self.attention_output, (attended, x))?;
        let normed = pass.apply(&self.mlp_norm, [&x])?;
        let inner = pass.apply(&self.mlp_in, [normed])?;
        let x = pass.apply(&self.mlp_out, (inner, x))?;
        pass.output(HIDDEN, x);
        Ok(())
    }
}

/// The loss over the targets of a batch; of a batch without targets, the logits.
#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) norm: Arc<Norm>,
    pub(crate) loss: Arc<LossHead>,
}

impl Unit for Head {
    fn forward(&self, pass: &mut Pass<'_>) -> Result<(), DeviceError> {
        let x = pass.input(HIDDEN);
        let normed = pass.apply(&self.norm, [x])?;
        match pass.optional_batch(TARGETS) {
            Some(targets) => pass.apply_loss(&self.loss, (normed, targets), 1.0),
            None => {
                let logits = pass.logits(&self.loss, &normed)?;
                pass.output(LOGITS, logits);
                Ok(())
            }
        }
    }
}
