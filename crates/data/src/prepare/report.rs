use super::files::REPORT_FILE;
use crate::{DataError, TokenFileWriter, files};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io::ErrorKind;
use std::path::Path;
use trireme_base::read_at_most;

/// Maximum size of a report, far more than any needs.
const REPORT_BYTES_MAX: u64 = 16 << 20;

/// The size of the training or the validation part of a corpus.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SplitSize {
    /// Number of tokens, including end-of-document tokens.
    pub num_tokens: u64,
    /// Number of documents.
    pub num_documents: u64,
}

impl SplitSize {
    pub(super) fn of(writer: &TokenFileWriter) -> Self {
        SplitSize { num_tokens: writer.num_tokens(), num_documents: writer.num_documents() }
    }
}

/// An input with a sampling weight. Its training tokens follow those of the previous input.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Source {
    /// The input, as the user specified it.
    pub input: String,
    /// Relative sampling weight.
    pub weight: f64,
    /// Number of training tokens.
    pub num_tokens: u64,
}

/// Numbers of records and files in the formats of other programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ConvertedFormats {
    /// ShareGPT records: `conversations` of turns with `from` and `value`.
    pub num_share_gpt: u64,
    /// Alpaca records: an `instruction`, an optional `input`, and an `output`.
    pub num_alpaca: u64,
    /// Files that are one JSON array of records.
    pub num_arrays: u64,
}

impl ConvertedFormats {
    pub(super) fn add(&mut self, other: Self) {
        self.num_share_gpt += other.num_share_gpt;
        self.num_alpaca += other.num_alpaca;
        self.num_arrays += other.num_arrays;
    }
}

impl fmt::Display for ConvertedFormats {
    /// Formats the counts as `read 3 ShareGPT conversations, 1 file as a JSON array of records`; empty if all are 0.
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

/// Numbers of skipped files, folders and records, by reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Skipped {
    /// Files and folders whose names begin with a dot.
    pub hidden: u64,
    /// Folders named `target`, Cargo's build folders.
    pub target_folders: u64,
    /// Files that have none of the requested extensions.
    pub other_extensions: u64,
    /// Symbolic links, pipes, devices and sockets.
    pub not_files: u64,
    /// Files with a NUL byte near their beginning.
    pub binary: u64,
    /// Files and records without text.
    pub empty: u64,
}

impl Skipped {
    /// Returns the sum of all counts.
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
    /// Formats the counts as `3 hidden, 1 binary`, or `none`.
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

/// The report of [`prepare`](crate::prepare), stored next to the token files.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PrepareReport {
    /// The inputs, as the user specified them.
    pub inputs: Vec<String>,
    /// A description of the tokenizer: `bytes`, the path of a `tokenizer.json`, the model that it comes from, or a note
    /// that it was trained on the inputs.
    pub tokenizer: String,
    /// CRC-32 of the tokenizer's file; absent in reports of earlier versions.
    #[serde(default)]
    pub tokenizer_crc32: Option<u32>,
    /// [`Tokenizer::sha256`](crate::Tokenizer::sha256) of the tokenizer; absent in reports of earlier versions.
    #[serde(default)]
    pub tokenizer_sha256: Option<String>,
    /// Whether only some tokens count in the loss. Then there is a loss mask for each token file.
    #[serde(default)]
    pub has_loss_mask: bool,
    /// The inputs with their weights and training tokens; empty if inputs have no weights.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<Source>,
    /// Vocabulary size of the tokenizer: every token id is below it. The model's vocabulary must be at least as large.
    pub vocabulary_size: usize,
    /// Id of the end-of-document token, if the tokenizer has one.
    pub end_of_document: Option<u32>,
    /// The `eos_token` of the tokenizer's `tokenizer_config.json`, if the tokenizer does not have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unknown_end_of_document: Option<String>,
    /// The text with which the chat template ends an answer, if it looks like a special token but the tokenizer does
    /// not have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unknown_end_of_answer: Option<String>,
    /// The training part.
    pub train: SplitSize,
    /// The validation part, if there is one.
    pub validation: Option<SplitSize>,
    /// Number of files that were read.
    pub num_files: u64,
    /// Total bytes of all input files, including binary ones.
    pub input_bytes: u64,
    /// Numbers of skipped files, folders and records.
    pub skipped: Skipped,
    /// Number of invalid UTF-8 sequences, and lone surrogates in JSON, that were replaced by U+FFFD.
    pub num_invalid_utf8_replaced: u64,
    /// Records and files in the formats of other programs; absent in reports of earlier versions.
    #[serde(default)]
    pub foreign_forms: ConvertedFormats,
    /// Number of special-token names in messages that were encoded as plain text.
    #[serde(default)]
    pub num_literal_names: u64,
    /// Number of conversations that became one document for each answer, because the chat template renders earlier
    /// messages differently once later ones follow.
    #[serde(default)]
    pub num_split_conversations: u64,
    /// Identifies the inputs and options; see [`is_up_to_date`](crate::is_up_to_date).
    pub fingerprint: String,
}

impl PrepareReport {
    /// Reads the report of the corpus in `folder`.
    ///
    /// # Errors
    /// If there is no report, or it cannot be read or parsed.
    pub fn read(folder: &Path) -> Result<Self, DataError> {
        let path = folder.join(REPORT_FILE);
        let json = read_at_most(&path, REPORT_BYTES_MAX).map_err(|source| match source.kind() {
            ErrorKind::NotFound => DataError::NotPrepared { folder: folder.to_owned() },
            _ => DataError::Read { path: path.clone(), source },
        })?;
        serde_json::from_slice(&json).map_err(|source| DataError::Report { path, source })
    }

    /// Returns notices about unexpected properties of the corpus.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        if self.foreign_forms != ConvertedFormats::default() {
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
