//! Incremental decoding, one token at a time.

use super::Tokenizer;
use crate::DataError;

const UNFINISHED: char = '\u{FFFD}';
/// Maximum number of bytes of a character that lacks its last byte.
const UNFINISHED_MAX: usize = 3;
/// Maximum number of tokens without a complete character. After these, the text is noise and is returned as it is.
const HELD_TOKENS_MAX: usize = 64;

/// Decodes a growing sequence of tokens, for output during generation.
///
/// If the bytes of a character are spread over several tokens, the character is held back until it is complete, so no
/// piece of text contains half a character. The concatenation of all pieces, including the last piece from
/// [`finish`](Self::finish), is the text of the whole sequence.
///
/// Each pushed token costs decoding it together with a few tokens before it.
#[derive(Debug)]
pub struct StreamDecoder<'a> {
    tokenizer: &'a Tokenizer,
    /// The tokens of the last complete piece, as context, and the tokens after it.
    ids: Vec<u32>,
    num_context: usize,
    /// Number of bytes of the text of `ids` that were already returned.
    num_returned_bytes: usize,
}

impl Tokenizer {
    /// Returns a decoder that takes one id at a time, as a model generates them.
    pub fn stream_decoder(&self) -> StreamDecoder<'_> {
        StreamDecoder { tokenizer: self, ids: Vec::new(), num_context: 0, num_returned_bytes: 0 }
    }
}

impl StreamDecoder<'_> {
    /// Adds the next token, and returns the text that is now final. This is often the text of the token itself.
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
        let piece = finished.get(self.num_returned_bytes..).unwrap_or("").to_owned();
        self.num_returned_bytes += piece.len();
        Ok(piece)
    }

    /// Returns the rest of the text, with U+FFFD for an incomplete character.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn finish(self) -> Result<String, DataError> {
        let text = self.tokenizer.decode(&self.ids)?;
        Ok(text.get(self.num_returned_bytes..).unwrap_or("").to_owned())
    }

    /// Returns the rest of `text`. The tokens since the last piece become the context.
    fn start_next_piece(&mut self, text: &str) -> Result<String, DataError> {
        let piece = text.get(self.num_returned_bytes..).unwrap_or("").to_owned();
        self.ids.drain(..self.num_context);
        self.num_context = self.ids.len();
        self.num_returned_bytes = self.tokenizer.decode(&self.ids)?.len();
        Ok(piece)
    }
}
