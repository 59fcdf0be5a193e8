//! Text generation.

use crate::error::TrainError;
use trireme_base::{Random, RandomKey};
use trireme_data::{Prompt, Tokenizer};
use trireme_model::{ModelConfig, Sampling};
use trireme_parallel::{Executor, Generation};

/// The prompt of a text to generate, and the options of the generation.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerationSettings {
    /// Text to continue.
    pub prompt: Prompt,
    /// Maximum number of tokens to add.
    pub num_tokens: usize,
    /// The method by which each token is chosen.
    pub sampling: Sampling,
    /// Seed of the random choices.
    pub seed: u64,
    /// Whether the tokenizer's end-of-document token ends the text.
    pub stop_at_end: bool,
    /// Other tokens that end the text like the end-of-document token.
    pub end_tokens: Vec<u32>,
    /// Tokens that end the text like a stop sequence.
    pub stop_tokens: Vec<u32>,
    /// Stop sequences. The text ends before the first one.
    pub stop: Vec<String>,
}

/// The reason why a text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// The text has as many tokens as were asked for.
    TokenLimit,
    /// At an end-of-document token.
    EndOfDocument,
    /// Before a stop sequence or a stop token.
    StopSequence,
    /// The model supports no more positions.
    PositionLimit,
}

/// A filter that passes text on piece by piece, but holds back text that may belong to a stop sequence.
struct StopFilter<'a> {
    stop: &'a [String],
    /// Text that is held back because a stop sequence may begin in it.
    held: String,
}

impl StopFilter<'_> {
    /// Adds text. Returns the text that can be passed on, and whether the text has ended.
    fn push(&mut self, piece: &str) -> (String, bool) {
        self.held.push_str(piece);
        let found = self.stop.iter().filter_map(|stop| self.held.find(stop.as_str())).min();
        if let Some(end) = found {
            self.held.truncate(end);
            return (std::mem::take(&mut self.held), true);
        }
        // The end of the held text may be the beginning of a stop sequence.
        let longest = |stop: &String| {
            let lens = (1..stop.len()).rev().filter(|&len| stop.is_char_boundary(len));
            lens.into_iter().find(|&len| self.held.ends_with(&stop[..len])).unwrap_or(0)
        };
        let num_held = self.stop.iter().map(longest).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - num_held);
        (std::mem::replace(&mut self.held, rest), false)
    }
}

/// Generates text, and passes it to `text` piece by piece. Returns the reason why it ended.
///
/// # Errors
/// If the prompt is longer than the model supports, has tokens outside of the model's vocabulary, or has text but no tokens; failures of
/// the device.
pub fn generate_text(
    executor: &mut Executor,
    config: &ModelConfig,
    tokenizer: &Tokenizer,
    settings: &GenerationSettings,
    mut text: impl FnMut(&str),
) -> Result<FinishReason, TrainError> {
    let mut tokens = Vec::new();
    tokenizer.encode_prompt(&settings.prompt, &mut tokens)?;
    if tokens == tokenizer.prefix_tokens() && !settings.prompt.text.trim().is_empty() {
        return Err(TrainError::PromptWithoutTokens { prompt: settings.prompt.text.clone() });
    }
    if tokens.is_empty() {
        // The end of a document precedes the beginning of the next one.
        tokens.push(tokenizer.end_of_document().unwrap_or(0));
    }
    if let Some(&token) = tokens.iter().find(|&&token| token as usize >= config.vocab_size) {
        return Err(TrainError::TokenOutsideVocabulary { token, vocab_size: config.vocab_size });
    }
    let (num_prompt, max_position_embeddings) = (tokens.len(), config.max_positions());
    if num_prompt > max_position_embeddings {
        return Err(TrainError::PromptTooLong { num_tokens: num_prompt, max_position_embeddings });
    }
    let num_tokens = settings.num_tokens.min(max_position_embeddings + 1 - num_prompt);
    let capacity = max_position_embeddings.min(num_prompt + num_tokens);
    let mut generation = Generation::new(executor, capacity);
    let mut random = Random::new(RandomKey::new(settings.seed, "sampling"), 0);
    let mut decoder = tokenizer.stream_decoder();
    let mut stops = StopFilter { stop: &settings.stop, held: String::new() };
    for _ in 0..num_tokens {
        let logits = generation.append(&tokens)?;
        // A vocabulary may be padded beyond the tokenizer's ids. Padding ids have no text, so they are not chosen.
        let known = tokenizer.vocabulary_size().min(logits.len());
        let token = settings.sampling.choose(&logits[..known], &mut random);
        let is_end = tokenizer.end_of_document() == Some(token) || settings.end_tokens.contains(&token);
        let is_stop = settings.stop_tokens.contains(&token);
        if is_stop || (settings.stop_at_end && is_end) {
            let (rest, is_stopped) = stops.push(&decoder.finish()?);
            text(&rest);
            if !is_stopped {
                text(&stops.held);
            }
            return Ok(if is_stop { FinishReason::StopSequence } else { FinishReason::EndOfDocument });
        }
        let (piece, is_stopped) = stops.push(&decoder.push(token)?);
        text(&piece);
        if is_stopped {
            return Ok(FinishReason::StopSequence);
        }
        tokens.clear();
        tokens.push(token);
    }
    let (rest, is_stopped) = stops.push(&decoder.finish()?);
    text(&rest);
    if is_stopped {
        return Ok(FinishReason::StopSequence);
    }
    text(&stops.held);
    Ok(if num_tokens < settings.num_tokens { FinishReason::PositionLimit } else { FinishReason::TokenLimit })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_ends_before_a_stop_sequence_and_outputs_no_part_of_it() {
        let stop = ["END".to_owned(), "\n\n".to_owned()];
        let given = |pieces: &[&str]| {
            let mut stops = StopFilter { stop: &stop, held: String::new() };
            let mut text = String::new();
            for piece in pieces {
                let (more, is_stopped) = stops.push(piece);
                text += &more;
                if is_stopped {
                    return (text, true);
                }
            }
            (text + &stops.held, false)
        };
        assert_eq!(given(&["a E", "N", "D b"]), ("a ".to_owned(), true));
        assert_eq!(given(&["a E", "N", "x\n"]), ("a ENx\n".to_owned(), false));
        assert_eq!(given(&["é\n", "\nEND"]), ("é".to_owned(), true));
    }
}
