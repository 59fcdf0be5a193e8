//! Batches of language models.

use crate::bundle::{HostBatch, TensorSpec};
use trireme_base::DType;

/// Name of the token ids that a language model reads: `[batch, seq_len]`, u32.
pub const TOKENS: &str = "tokens";

/// Name of the token ids that a language model predicts, shifted by one position: `[batch, seq_len]`, u32.
pub const TARGETS: &str = "targets";

/// Name of the loss weights of the predictions: `[batch, seq_len]`, f32. Optional; the default is 1. The loss of a batch is the mean of the
/// weighted losses over all positions.
pub const LOSS_WEIGHTS: &str = "loss_weights";

/// Name of the weights of tokens in router statistics: `[batch, seq_len]`, f32. Optional; the default is 1. Padding has weight 0 and is
/// sent to no expert. All other tokens have the same weight, chosen so that the weighted mean over all positions of a step equals the mean
/// over the tokens of the step.
pub const TOKEN_WEIGHTS: &str = "token_weights";

/// Name of the last unit's output for a batch without targets: `[batch, seq_len, vocabulary]`, f32.
pub const LOGITS: &str = "logits";

/// Name of the document starts: for each token, the position in its sequence where its document starts, `[batch, seq_len]`. Optional. With
/// it, no token attends to earlier documents.
pub const DOCUMENT_STARTS: &str = "document_starts";

/// Returns the specs of a batch of `batch` sequences of `seq_len` tokens: tokens and targets.
pub fn token_specs(batch: usize, seq_len: usize) -> Vec<TensorSpec> {
    [TOKENS, TARGETS].map(|name| TensorSpec::new(name, &[batch, seq_len], DType::U32)).into()
}

/// Fills row `row` of a batch of tokens and targets from a window of `seq_len + 1` tokens.
///
/// # Panics
/// If the batch has no tokens or targets, or if the window or the row does not fit.
pub fn set_window(batch: &mut HostBatch, row: usize, window: &[u32]) {
    let seq_len = window.len() - 1;
    for (name, tokens) in [(TOKENS, &window[..seq_len]), (TARGETS, &window[1..])] {
        batch.sample_mut(name, row, DType::U32).copy_from_slice(bytemuck::cast_slice(tokens));
    }
}
