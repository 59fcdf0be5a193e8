//! Batches of language models.

use crate::bundle::{HostBatch, TensorSpec};
use trireme_base::DType;

/// Name of the ids that a language model reads: `[batch, seq_len]`, u32.
pub const TOKENS: &str = "tokens";

/// Name of the ids that it predicts, one position further: `[batch, seq_len]`, u32.
pub const TARGETS: &str = "targets";

/// Name of the weights of the predictions' losses: `[batch, seq_len]`, f32. Optional: without them all weigh 1. The loss of a batch is the mean of the
/// weighted losses over all positions.
pub const LOSS_WEIGHTS: &str = "loss_weights";

/// Name of the weights of tokens in statistics of routers: `[batch, seq_len]`, f32. Optional: without them all weigh 1. Padding weighs 0, and is given to no expert;
/// the other weights are equal and make a mean over all positions of a step one over its tokens.
pub const TOKEN_WEIGHTS: &str = "token_weights";

/// Name of what the last unit of a language model passes on of a batch without targets: `[batch, seq_len, vocabulary]`, f32.
pub const LOGITS: &str = "logits";

/// Name of the tensor of a batch that says for each token at which position of its sequence its document begins: `[batch, seq_len]`. Optional:
/// with it, no token attends to those of documents before.
pub const DOCUMENT_STARTS: &str = "document_starts";

/// What a batch of `batch` sequences of `seq_len` tokens consists of.
pub fn token_specs(batch: usize, seq_len: usize) -> Vec<TensorSpec> {
    [TOKENS, TARGETS].map(|name| TensorSpec::new(name, &[batch, seq_len], DType::U32)).into()
}

/// Fills row `row` of a batch of tokens from a window of `seq_len + 1` of them.
///
/// # Panics
/// If the batch is none of tokens, or the window or the row does not fit.
pub fn set_window(batch: &mut HostBatch, row: usize, window: &[u32]) {
    let seq_len = window.len() - 1;
    for (name, tokens) in [(TOKENS, &window[..seq_len]), (TARGETS, &window[1..])] {
        batch.sample_mut(name, row, DType::U32).copy_from_slice(bytemuck::cast_slice(tokens));
    }
}
