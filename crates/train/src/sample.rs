//! Text from a model.

use crate::error::TrainError;
use trireme_base::{Random, RandomKey};
use trireme_data::{Prompt, Tokenizer};
use trireme_model::{ModelConfig, Sampling};
use trireme_parallel::{Executor, Generation};

/// What to generate, and how.
#[derive(Debug, Clone, PartialEq)]
pub struct SampleSettings {
    /// Text to continue.
    pub prompt: Prompt,
    /// Tokens to add at most.
    pub num_tokens: usize,
    /// How each is chosen.
    pub sampling: Sampling,
    /// Seed of the choice.
    pub seed: u64,
    /// Whether the tokenizer's end of a document ends the text.
    pub stop_at_end: bool,
    /// Other tokens that end the text as the end of a document does.
    pub end_tokens: Vec<u32>,
    /// Tokens that end the text as one of the texts in `stop` does.
    pub stop_tokens: Vec<u32>,
    /// Texts before the first of which the text ends.
    pub stop: Vec<String>,
}

/// Why a text ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// It has as many tokens as were asked for.
    AsAsked,
    /// By the end of a document.
    AtEnd,
    /// Before one of the texts that end it.
    AtStop,
    /// The model has no more positions.
    AtModelLength,
}

/// What is given out of a text while it grows, so that none of the texts that end it is.
struct Stops<'a> {
    stop: &'a [String],
    /// What was not given out yet.
    held: String,
}

impl Stops<'_> {
    /// Takes more text; what can be given out. `true` if the text has ended.
    fn push(&mut self, piece: &str) -> (String, bool) {
        self.held.push_str(piece);
        let found = self.stop.iter().filter_map(|stop| self.held.find(stop.as_str())).min();
        if let Some(end) = found {
            self.held.truncate(end);
            return (std::mem::take(&mut self.held), true);
        }
        // The beginning of a text that ends it may be the end of what is here.
        let longest = |stop: &String| {
            let lens = (1..stop.len()).rev().filter(|&len| stop.is_char_boundary(len));
            lens.into_iter().find(|&len| self.held.ends_with(&stop[..len])).unwrap_or(0)
        };
        let num_held = self.stop.iter().map(longest).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - num_held);
        (std::mem::replace(&mut self.held, rest), false)
    }
}

/// Generates text and hands it out piece by piece; returns why it ends.
///
/// # Errors
/// A prompt that is longer than the model supports, has tokens that the model does not know, or has text but no tokens; and what the device
/// refuses.
pub fn sample(
    executor: &mut Executor,
    config: &ModelConfig,
    tokenizer: &Tokenizer,
    settings: &SampleSettings,
    mut text: impl FnMut(&str),
) -> Result<Ended, TrainError> {
    let mut tokens = Vec::new();
    tokenizer.encode_prompt(&settings.prompt, &mut tokens)?;
    if tokens == tokenizer.beginning() && !settings.prompt.text.trim().is_empty() {
        return Err(TrainError::PromptWithoutTokens { prompt: settings.prompt.text.clone() });
    }
    if tokens.is_empty() {
        // A document begins where another has ended.
        tokens.push(tokenizer.end_of_document().unwrap_or(0));
    }
    if let Some(&token) = tokens.iter().find(|&&token| token as usize >= config.vocab_size) {
        return Err(TrainError::ForeignToken { token, vocab_size: config.vocab_size });
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
    let mut stops = Stops { stop: &settings.stop, held: String::new() };
    for _ in 0..num_tokens {
        let logits = generation.read(&tokens)?;
        // A vocabulary may be padded beyond the tokenizer's ids; those stand for nothing.
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
            return Ok(if is_stop { Ended::AtStop } else { Ended::AtEnd });
        }
        let (piece, is_stopped) = stops.push(&decoder.push(token)?);
        text(&piece);
        if is_stopped {
            return Ok(Ended::AtStop);
        }
        tokens.clear();
        tokens.push(token);
    }
    let (rest, is_stopped) = stops.push(&decoder.finish()?);
    text(&rest);
    if is_stopped {
        return Ok(Ended::AtStop);
    }
    text(&stops.held);
    Ok(if num_tokens < settings.num_tokens { Ended::AtModelLength } else { Ended::AsAsked })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_ends_before_what_ends_it_and_nothing_of_that_is_given_out() {
        let stop = ["END".to_owned(), "\n\n".to_owned()];
        let given = |pieces: &[&str]| {
            let mut stops = Stops { stop: &stop, held: String::new() };
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
