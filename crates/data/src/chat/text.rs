//! Texts that chat templates render.

use serde::{Deserialize, Serialize};
use std::ops::Range;

/// A document in which only the answers are learned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AnnotatedText {
    /// The text of the document.
    pub text: String,
    /// Byte ranges of the answers in `text`, in ascending order.
    pub answers: Vec<Range<usize>>,
    /// Byte positions in `text`, in ascending order: for each special-token name that comes from a message, the end of the name's first
    /// character. A prefix of a name at the end of a string counts as a name. These names are encoded as plain text.
    pub literal: Vec<usize>,
    /// Whether to put the tokenizer's beginning tokens before the document, because its text does not contain them.
    pub adds_beginning: bool,
    /// Whether to put the tokenizer's ending tokens after the document, because its text does not contain them.
    pub adds_end: bool,
}

/// The documents from which a model learns the answers of one conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConversationDocuments {
    /// The conversation as one document. If the template renders earlier messages differently once later ones follow,
    /// there is one document for each answer instead, with the messages before it as they are rendered at that point.
    pub documents: Vec<AnnotatedText>,
    /// Number of special-token names in the messages.
    pub num_names: u64,
}

/// A text for a model to continue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prompt {
    /// The text.
    pub text: String,
    /// Positions within special-token names that come from a message, as in [`AnnotatedText::literal`].
    pub literal: Vec<usize>,
    /// Whether to put the tokenizer's beginning tokens before the text. Chat templates write them themselves.
    pub adds_beginning: bool,
}

impl From<String> for Prompt {
    fn from(text: String) -> Self {
        Prompt { text, literal: Vec::new(), adds_beginning: true }
    }
}
