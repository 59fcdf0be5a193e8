//! Decoding of tokens one at a time.

use super::Tokenizer;
use crate::DataError;

const UNFINISHED: char = '\u{FFFD}';
/// The bytes of a character that can be missing its end.
const UNFINISHED_MAX: usize = 3;
/// After so many tokens without a finished character the text is noise: it is given out as it stands.
const HELD_TOKENS_MAX: usize = 64;

/// Decodes a growing sequence of tokens, for output while a model generates.
///
/// A character whose bytes are spread over several tokens is held back until it is complete, so that no piece
/// of text holds a broken half. The pieces, with [`finish`](Self::finish), join to the text of the whole
/// sequence.
///
/// A token costs the decoding of itself and of the few tokens before it that it may change.
#[derive(Debug)]
pub struct StreamDecoder<'a> {
    tokenizer: &'a Tokenizer,
    /// The tokens of the last finished piece, for context, and those since.
    ids: Vec<u32>,
    num_context: usize,
    /// How much of the text of `ids` was given out, in bytes.
    given: usize,
}

impl Tokenizer {
    /// Decodes ids one at a time, as a model makes them.
    pub fn stream_decoder(&self) -> StreamDecoder<'_> {
        StreamDecoder { tokenizer: self, ids: Vec::new(), num_context: 0, given: 0 }
    }
}

impl StreamDecoder<'_> {
    /// Takes the next token and returns the text that became final by it, often that of this very token.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn push(&mut self, id: u32) -> Result<String, DataError> {
        self.ids.push(id);
        let text = self.tokenizer.decode(&self.ids)?;
        let num_unfinished =
            text.chars().rev().take(UNFINISHED_MAX).take_while(|&last| last == UNFINISHED).count();
        if num_unfinished == 0 || self.ids.len() - self.num_context >= HELD_TOKENS_MAX {
            return self.start_next_piece(&text);
        }
        let finished = &text[..text.len() - num_unfinished * UNFINISHED.len_utf8()];
        let piece = finished.get(self.given..).unwrap_or("").to_owned();
        self.given += piece.len();
        Ok(piece)
    }

    /// Ends the text: what was held back, with U+FFFD for a character that never became complete.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn finish(self) -> Result<String, DataError> {
        let text = self.tokenizer.decode(&self.ids)?;
        Ok(text.get(self.given..).unwrap_or("").to_owned())
    }

    /// Gives out all of `text`; the tokens since the last piece become the context.
    fn start_next_piece(&mut self, text: &str) -> Result<String, DataError> {
        let piece = text.get(self.given..).unwrap_or("").to_owned();
        self.ids.drain(..self.num_context);
        self.num_context = self.ids.len();
        self.given = self.tokenizer.decode(&self.ids)?.len();
        Ok(piece)
    }
}
