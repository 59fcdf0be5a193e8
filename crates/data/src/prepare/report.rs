use super::files::REPORT_FILE;
use crate::{DataError, TokenFileWriter, files};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io::ErrorKind;
use std::path::Path;
use trireme_base::read_at_most;

/// Far above what a report needs.
const REPORT_BYTES_MAX: u64 = 16 << 20;

/// One of the token files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// Its tokens, the ends of documents among them.
    pub num_tokens: u64,
    /// Its documents.
    pub num_documents: u64,
}

impl Part {
    pub(super) fn of(writer: &TokenFileWriter) -> Self {
        Part { num_tokens: writer.num_tokens(), num_documents: writer.num_documents() }
    }
}

/// An input with a weight. Its tokens to train on follow those of the input before.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Source {
    /// As it was given.
    pub input: String,
    /// How often its samples come, relative to those of other inputs.
    pub weight: f64,
    /// Its tokens to train on.
    pub num_tokens: u64,
}

/// Numbers of records and files in forms that other programs use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ForeignForms {
    /// Records of ShareGPT: `conversations` of turns with `from` and `value`.
    pub num_share_gpt: u64,
    /// Records of Alpaca: an `instruction`, an optional `input`, and an `output`.
    pub num_alpaca: u64,
    /// Files that are one JSON array of records.
    pub num_arrays: u64,
}

impl ForeignForms {
    pub(super) fn add(&mut self, other: Self) {
        self.num_share_gpt += other.num_share_gpt;
        self.num_alpaca += other.num_alpaca;
        self.num_arrays += other.num_arrays;
    }
}

impl fmt::Display for ForeignForms {
    /// `read 3 ShareGPT conversations, 1 file as a JSON array of records`; empty if there are none.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [
            (self.num_share_gpt, "ShareGPT conversation", "ShareGPT conversations"),
            (self.num_alpaca, "Alpaca record", "Alpaca records"),
            (self.num_arrays, "file as a JSON array of records", "files as JSON arrays of records"),
        ];
        let mut separator = "read ";
        for (count, one, several) in parts.into_iter().filter(|(count, ..)| *count > 0) {
            write!(f, "{separator}{count} {}", if count == 1 { one } else { several })?;
            separator = ", ";
        }
        Ok(())
    }
}

/// Files and folders that were passed over, by reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Skipped {
    /// Names that start with a dot.
    pub hidden: u64,
    /// Folders named `target`, where Cargo builds.
    pub target_folders: u64,
    /// Files without one of the extensions asked for.
    pub other_extensions: u64,
    /// Symbolic links, pipes, devices and sockets.
    pub not_files: u64,
    /// Files with a NUL byte near their beginning.
    pub binary: u64,
    /// Files and JSON objects without any text.
    pub empty: u64,
}

impl Skipped {
    /// All of them.
    pub fn total(&self) -> u64 {
        self.named().iter().map(|(_, count)| count).sum()
    }

    fn named(&self) -> [(&'static str, u64); 6] {
        [
            ("hidden", self.hidden),
            ("target folders", self.target_folders),
            ("other extensions", self.other_extensions),
            ("special files", self.not_files),
            ("binary", self.binary),
            ("empty", self.empty),
        ]
    }
}

impl fmt::Display for Skipped {
    /// `3 hidden, 1 binary`, or `none`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts: Vec<String> = self
            .named()
            .iter()
            .filter(|(_, count)| *count > 0)
            .map(|(name, count)| format!("{count} {name}"))
            .collect();
        f.pad(if parts.is_empty() { "none" } else { "" })?;
        f.write_str(&parts.join(", "))
    }
}

/// What [`prepare`](crate::prepare) did; stored beside the token files.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PrepareReport {
    /// The inputs as they were given.
    pub inputs: Vec<String>,
    /// `bytes`, the path of a `tokenizer.json`, or that one was trained.
    pub tokenizer: String,
    /// CRC-32 of the tokenizer's file; absent in reports of earlier versions.
    #[serde(default)]
    pub tokenizer_crc32: Option<u32>,
    /// [`Tokenizer::sha256`](crate::Tokenizer::sha256) of the tokenizer; absent in reports of earlier versions.
    #[serde(default)]
    pub tokenizer_sha256: Option<String>,
    /// Whether only some of the tokens are to be learned; a file beside those of the tokens says which.
    #[serde(default)]
    pub has_loss_mask: bool,
    /// The inputs with their tokens to train on, where they have weights.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<Source>,
    /// Every token lies below this; the model's vocabulary must be at least as large.
    pub vocabulary_size: usize,
    /// The token after each document, if the tokenizer has one.
    pub end_of_document: Option<u32>,
    /// The `eos_token` of the tokenizer's `tokenizer_config.json`, if the tokenizer does not have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unknown_end_of_document: Option<String>,
    /// The text with which the chat template ends an answer, if it looks like a special token that the tokenizer lacks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unknown_end_of_answer: Option<String>,
    /// What there is to train on.
    pub train: Part,
    /// What was held out.
    pub validation: Option<Part>,
    /// Files that were read.
    pub num_files: u64,
    /// Bytes of all files, those found to be binary among them.
    pub input_bytes: u64,
    /// What was passed over.
    pub skipped: Skipped,
    /// Invalid UTF-8 sequences and lone surrogates in JSON that became U+FFFD.
    pub num_invalid_utf8_replaced: u64,
    /// Records and files in forms of other programs; absent in reports of earlier versions.
    #[serde(default)]
    pub foreign_forms: ForeignForms,
    /// Names of special tokens in messages that stayed text.
    #[serde(default)]
    pub num_literal_names: u64,
    /// Conversations that became a document for each answer, because the chat template shows earlier messages differently once others
    /// follow.
    #[serde(default)]
    pub num_split_conversations: u64,
    /// Names the inputs and options; see [`is_current`](crate::is_current).
    pub fingerprint: String,
}

impl PrepareReport {
    /// Reads the report of the corpus in `folder`.
    ///
    /// # Errors
    /// If there is none, or it cannot be read or understood.
    pub fn read(folder: &Path) -> Result<Self, DataError> {
        let path = folder.join(REPORT_FILE);
        let json = read_at_most(&path, REPORT_BYTES_MAX).map_err(|source| match source.kind() {
            ErrorKind::NotFound => DataError::NotPrepared { folder: folder.to_owned() },
            _ => DataError::Read { path: path.clone(), source },
        })?;
        serde_json::from_slice(&json).map_err(|source| DataError::Report { path, source })
    }

    /// Sentences about the tokens that a user may not expect.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if self.foreign_forms != ForeignForms::default() {
            notes.push(self.foreign_forms.to_string());
        }
        if let Some(name) = &self.unknown_end_of_document {
            let instead = match self.end_of_document {
                Some(id) => format!("token {id} ends documents instead"),
                None => "nothing ends documents, so a model cannot learn where to stop".to_owned(),
            };
            notes.push(format!(
                "tokenizer_config.json has {name:?} as its eos_token, which the tokenizer does not have; {instead}"
            ));
        } else if self.end_of_document.is_none() {
            notes.push(
                "the tokenizer has no token that ends a document, so a model cannot learn where to stop; name one as eos_token in \
                 tokenizer_config.json"
                    .to_owned(),
            );
        }
        if let Some(name) = &self.unknown_end_of_answer {
            notes.push(format!(
                "the chat template ends answers with {name}, which is not a token of the tokenizer, so it is learned as text"
            ));
        }
        if self.num_split_conversations > 0 {
            notes.push(format!(
                "{} of the conversations became one document for each answer, because the chat template shows earlier messages differently \
                 once others follow",
                self.num_split_conversations
            ));
        }
        if self.num_literal_names > 0 {
            notes.push(format!(
                "{} of special tokens in messages stayed text",
                if self.num_literal_names == 1 {
                    "1 name".to_owned()
                } else {
                    format!("{} names", self.num_literal_names)
                }
            ));
        }
        notes
    }

    pub(super) fn write(&self, path: &Path) -> Result<(), DataError> {
        let mut json = serde_json::to_vec_pretty(self).expect("a report has only texts and numbers");
        json.push(b'\n');
        files::replace(path, &json)
    }
}
