//! Text from a model.

use crate::error::TrainError;
use trireme_base::{Random, RandomKey};
use trireme_data::Tokenizer;
use trireme_model::{ModelConfig, Sampling};
use trireme_parallel::{Executor, Generation};

/// What to generate, and how.
#[derive(Debug, Clone, PartialEq)]
pub struct SampleSettings {
    /// Text to continue.
    pub prompt: String,
    /// Tokens to add at most.
    pub num_tokens: usize,
    /// How each is chosen.
    pub sampling: Sampling,
    /// Seed of the choice.
    pub seed: u64,
    /// Whether the tokenizer's end of a document ends the text.
    pub stop_at_end: bool,
}

/// Generates text and hands it out piece by piece; returns the number of tokens made. Ends early at the end
/// of a document, if asked to, and where the model's positions end.
pub fn sample(
    executor: &mut Executor,
    config: &ModelConfig,
    tokenizer: &Tokenizer,
    settings: &SampleSettings,
    mut text: impl FnMut(&str),
) -> Result<usize, TrainError> {
    let mut tokens = Vec::new();
    tokenizer.encode(&settings.prompt, &mut tokens)?;
    if tokens.is_empty() {
        // A document begins where another has ended.
        tokens.push(tokenizer.end_of_document().unwrap_or(0));
    }
    if let Some(&token) = tokens.iter().find(|&&token| token as usize >= config.vocab_size) {
        return Err(TrainError::ForeignToken { token, vocab_size: config.vocab_size });
    }
    let (num_prompt, max_position_embeddings) = (tokens.len(), config.max_position_embeddings);
    if num_prompt > max_position_embeddings {
        return Err(TrainError::PromptTooLong { num_tokens: num_prompt, max_position_embeddings });
    }
    let num_tokens = settings.num_tokens.min(max_position_embeddings + 1 - num_prompt);
    let capacity = max_position_embeddings.min(num_prompt + num_tokens);
    let mut generation = Generation::new(executor, capacity);
    let mut random = Random::new(RandomKey::new(settings.seed, "sampling"), 0);
    let mut decoder = tokenizer.stream_decoder();
    for index in 0..num_tokens {
        let logits = generation.read(&tokens)?;
        // A vocabulary may be padded beyond the tokenizer's ids; those stand for nothing.
        let known = tokenizer.vocabulary_size().min(logits.len());
        let token = settings.sampling.choose(&logits[..known], &mut random);
        if settings.stop_at_end && tokenizer.end_of_document() == Some(token) {
            text(&decoder.finish()?);
            return Ok(index);
        }
        text(&decoder.push(token)?);
        tokens.clear();
        tokens.push(token);
    }
    text(&decoder.finish()?);
    Ok(num_tokens)
}
