//! Batches of document pieces that are tokenized independently. Long documents are split into pieces, and batches have
//! similar sizes.

use crate::chat::AnnotatedText;
use crate::tokenizer::SpaceAtSplit;
use std::ops::Range;

/// Maximum length of a piece in bytes. It bounds the memory of the tokenizer for long documents.
const PIECE_BYTES_MAX: usize = 128 << 10;
/// A batch is complete when it has at least this many bytes.
const BATCH_BYTES_MIN: usize = 128 << 10;

/// The unit of work of a tokenizing thread.
#[derive(Debug, Default)]
pub(super) struct Batch {
    text: String,
    pieces: Vec<Piece>,
    /// Bytes of input that were read when this batch was complete.
    pub(super) input_bytes_read: u64,
}

/// A text that is tokenized independently of the texts before and after it.
#[derive(Debug)]
pub(super) struct Piece {
    /// End of the piece in the batch's text, in bytes.
    end: usize,
    pub(super) ends_document: bool,
    /// Index of the input that contains the piece.
    pub(super) source: usize,
    /// The byte ranges of the piece that count in the loss; `None` if all bytes do.
    pub(super) answers: Option<Vec<Range<usize>>>,
    /// Positions within special-token names that stay plain text, as in [`AnnotatedText::literal`].
    pub(super) literal: Vec<usize>,
    /// Whether the tokenizer's beginning tokens go before the piece.
    pub(super) adds_beginning: bool,
    /// Whether the tokenizer's ending tokens go after the piece.
    pub(super) adds_end: bool,
}

impl Batch {
    pub(super) fn is_full(&self) -> bool {
        self.text.len() >= BATCH_BYTES_MIN
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// The pieces with their texts, in order.
    pub(super) fn pieces(&self) -> impl Iterator<Item = (&str, &Piece)> {
        let mut start = 0;
        self.pieces.iter().map(move |piece| {
            let text = &self.text[start..piece.end];
            start = piece.end;
            (text, piece)
        })
    }

    /// Adds a whole document with answers. It is not split, because its answer ranges refer to the whole text.
    pub(super) fn push_with_answers(&mut self, document: AnnotatedText, source: usize) {
        self.text.push_str(&document.text);
        self.pieces.push(Piece {
            end: self.text.len(),
            ends_document: true,
            source,
            answers: Some(document.answers),
            literal: document.literal,
            adds_beginning: document.adds_beginning,
            adds_end: document.adds_end,
        });
    }

    fn push(&mut self, text: &str, adds_beginning: bool, ends_document: bool, source: usize) {
        self.text.push_str(text);
        self.pieces.push(Piece {
            end: self.text.len(),
            ends_document,
            source,
            answers: None,
            literal: Vec::new(),
            adds_beginning,
            adds_end: ends_document,
        });
    }
}

/// The text of one document that was read and is not yet in a batch.
#[derive(Debug, Default)]
pub(super) struct DocumentText {
    text: String,
    /// The text before this byte offset is already in a batch.
    start: usize,
    /// Whether a piece of the document is already in a batch.
    is_begun: bool,
}

impl DocumentText {
    /// The buffer to which newly read text is appended.
    pub(super) fn buffer(&mut self) -> &mut String {
        self.text.drain(..std::mem::take(&mut self.start));
        &mut self.text
    }

    /// Whether there is enough text to split off a piece.
    pub(super) fn exceeds_piece(&self) -> bool {
        self.text.len() - self.start > PIECE_BYTES_MAX
    }

    pub(super) fn is_empty(&self) -> bool {
        self.start == self.text.len()
    }

    /// Moves the next piece into `batch`: the rest of the document if it is short enough, otherwise a part of it.
    pub(super) fn move_piece(&mut self, batch: &mut Batch, source: usize, space_at_split: SpaceAtSplit) {
        let rest = &self.text[self.start..];
        let begins = !self.is_begun;
        self.is_begun = rest.len() > PIECE_BYTES_MAX;
        if !self.is_begun {
            batch.push(rest, begins, true, source);
            self.start = self.text.len();
            return;
        }
        let (end, next) = split_position(rest, PIECE_BYTES_MAX, space_at_split);
        batch.push(&rest[..end], begins, false, source);
        self.start += next;
    }
}

/// Returns where to split `text`, at most `bytes_max` from its start: the end of the piece, and the start of the next
/// one.
///
/// A space between two letters is a word boundary for every tokenizer that splits text into words, so splitting at the
/// last such space does not change the tokens. If the second half of the piece has no such space, the text is split
/// between two characters, possibly within a word.
fn split_position(text: &str, bytes_max: usize, space_at_split: SpaceAtSplit) -> (usize, usize) {
    let bytes = text.as_bytes();
    let between_letters = |&at: &usize| {
        bytes[at] == b' '
            && text[..at].chars().next_back().is_some_and(char::is_alphabetic)
            && text[at + 1..].chars().next().is_some_and(char::is_alphabetic)
    };
    match (bytes_max / 2..bytes_max).rev().find(between_letters) {
        Some(at) if space_at_split == SpaceAtSplit::Drop => (at, at + 1),
        Some(at) => (at, at),
        None => {
            let end = (0..=bytes_max).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0);
            (end, end)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_at_the_last_space_between_letters() {
        assert_eq!(split_position("ab cd ef gh", 8, SpaceAtSplit::Keep), (5, 5));
        assert_eq!(split_position("ab cd ef gh", 8, SpaceAtSplit::Drop), (5, 6));
        assert_eq!(split_position("ab cd ef  gh", 10, SpaceAtSplit::Keep), (5, 5), "of two spaces neither");
        assert_eq!(
            split_position("ab 1 . \n  x, y z", 14, SpaceAtSplit::Keep),
            (14, 14),
            "no space between letters"
        );
        assert_eq!(split_position("да нет да", 8, SpaceAtSplit::Keep), (4, 4));
    }

    #[test]
    fn splits_text_without_spaces_between_characters() {
        assert_eq!(split_position(&"a".repeat(20), 8, SpaceAtSplit::Keep), (8, 8));
        assert_eq!(split_position(&"€".repeat(20), 8, SpaceAtSplit::Keep), (6, 6));
    }

    #[test]
    fn the_pieces_of_a_document_join_to_it() {
        let text = "one two  three, ".repeat(PIECE_BYTES_MAX / 4);
        let mut document = DocumentText::default();
        document.buffer().push_str(&text);
        let mut joined = String::new();
        let (mut num_beginnings, mut num_ends) = (0, 0);
        while !document.is_empty() {
            let mut batch = Batch::default();
            document.move_piece(&mut batch, 0, SpaceAtSplit::Keep);
            for (text, piece) in batch.pieces() {
                assert!(text.len() <= PIECE_BYTES_MAX);
                joined.push_str(text);
                num_beginnings += usize::from(piece.adds_beginning);
                num_ends += usize::from(piece.ends_document && piece.adds_end);
            }
        }
        assert_eq!((joined, num_beginnings, num_ends), (text, 1, 1));
    }
}
