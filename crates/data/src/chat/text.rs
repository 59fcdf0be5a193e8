//! Texts that chat templates make of conversations.

use serde::{Deserialize, Serialize};
use std::ops::Range;

/// A document, and which parts of it a model is to learn.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answered {
    /// The document.
    pub text: String,
    /// In bytes, in order.
    pub answers: Vec<Range<usize>>,
    /// Byte positions, in order. A special token whose text contains one of them after its first byte was typed in a message, so it is encoded
    /// as text.
    pub literal: Vec<usize>,
    /// Whether the tokenizer's special tokens begin it, because the text has none of its own.
    pub adds_beginning: bool,
    /// Whether the tokenizer's special tokens end it, because the text has none of its own.
    pub adds_end: bool,
}

/// The documents that a model learns from a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Samples {
    /// The conversation as one document; or, if the template shows earlier messages differently once others follow, one document for each
    /// answer, with the messages before it as the template shows them then.
    pub documents: Vec<Answered>,
    /// Number of names of special tokens in the messages.
    pub num_names: u64,
}

/// Text for a model to continue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// The text.
    pub text: String,
    /// As [`Answered::literal`].
    pub literal: Vec<usize>,
    /// Whether the tokenizer's special tokens begin it. A chat template writes its own.
    pub adds_beginning: bool,
}

impl From<String> for Prompt {
    fn from(text: String) -> Self {
        Prompt { text, literal: Vec::new(), adds_beginning: true }
    }
}
