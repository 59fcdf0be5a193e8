use super::utf8::InvalidUtf8;
use crate::tokenizer::BPE_VOCABULARY_SIZE_MIN;
use crate::{ChatTemplate, DataError, Tokenizer, VOCABULARY_SIZE_MAX};
use std::fmt;
use std::num::NonZeroUsize;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;

pub(super) const STDIN: &str = "-";

/// One thread reads for all; it could not feed more than this.
const THREADS_MAX: NonZeroUsize = NonZeroUsize::new(256).expect("256 is not 0");

/// Which tokenizer turns the corpus into tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenizerChoice {
    /// [`Tokenizer::bytes`](crate::Tokenizer::bytes).
    Bytes,
    /// A Hugging Face `tokenizer.json`.
    File(PathBuf),
    /// That of a model.
    OfModel {
        /// The model, as the user names it.
        model: PathBuf,
        /// What was stored with it.
        tokenizer: Arc<Tokenizer>,
    },
    /// A byte-level BPE, trained on the corpus itself; of a corpus above 128 MiB, on evenly spread parts of
    /// it.
    TrainBpe {
        /// Tokens it may have at most, the 256 bytes and `<|endoftext|>` among them.
        vocabulary_size: usize,
    },
}

impl TokenizerChoice {
    /// Returns the size that the vocabulary has at least. It is exact unless the tokenizer is trained on the corpus.
    ///
    /// # Errors
    /// As [`Tokenizer::from_file`].
    pub fn vocabulary_size_min(&self) -> Result<usize, DataError> {
        Ok(match self {
            TokenizerChoice::Bytes => Tokenizer::bytes().vocabulary_size(),
            TokenizerChoice::File(path) => Tokenizer::from_file(path)?.vocabulary_size(),
            TokenizerChoice::OfModel { tokenizer, .. } => tokenizer.vocabulary_size(),
            TokenizerChoice::TrainBpe { .. } => BPE_VOCABULARY_SIZE_MIN,
        })
    }
}

impl fmt::Display for TokenizerChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TokenizerChoice::Bytes => f.write_str("bytes"),
            TokenizerChoice::File(path) => write!(f, "{}", path.display()),
            TokenizerChoice::OfModel { model, .. } => write!(f, "from the model {}", model.display()),
            TokenizerChoice::TrainBpe { vocabulary_size } => {
                write!(f, "BPE trained on the inputs, of at most {vocabulary_size} tokens")
            }
        }
    }
}

/// What [`prepare`](crate::prepare) reads, how, and where it writes.
#[derive(Debug, Clone, PartialEq)]
pub struct PrepareOptions {
    /// Text files, JSON-lines files (`.jsonl`, `.ndjson`, `.json`) and folders, read in this order; `-` is the standard input. Files
    /// may be compressed (`.gz`, `.zst`). Each is a source of its own.
    ///
    /// Folders are searched through to the bottom, sorted by name; hidden entries, folders named `target`,
    /// symbolic links and binary files in them are passed over.
    pub inputs: Vec<PathBuf>,
    /// The folder for the token files, made if it is not there.
    pub out: PathBuf,
    /// The tokenizer.
    pub tokenizer: TokenizerChoice,
    /// The field of a JSON object that holds the text.
    pub field: String,
    /// What makes a text of a conversation.
    pub chat_template: Option<ChatTemplate>,
    /// Whether the names of special tokens in messages become those tokens. Otherwise they are text, as a user typed them.
    pub special_tokens_in_messages: bool,
    /// How often samples of each input come, relative to those of the others; empty for as often as they have tokens.
    pub weights: Vec<f64>,
    /// What to validate on, as [`inputs`](Self::inputs), in place of a fraction of those.
    pub validation_inputs: Vec<PathBuf>,
    /// If any are named, folders give only files with one of these extensions (without the dot).
    pub extensions: Vec<String>,
    /// The treatment of bytes that are not valid UTF-8.
    pub invalid_utf8: InvalidUtf8,
    /// The share of tokens held out for validation, in `0..1`.
    pub validation_fraction: f64,
    /// Tokenizing threads, at most 256; the output does not depend on them.
    pub num_threads: NonZeroUsize,
}

impl PrepareOptions {
    /// The defaults: bytes, field `text`, every extension, invalid UTF-8 replaced, a twentieth held out, all
    /// cores.
    pub fn new(inputs: Vec<PathBuf>, out: PathBuf) -> Self {
        PrepareOptions {
            inputs,
            out,
            tokenizer: TokenizerChoice::Bytes,
            field: "text".to_owned(),
            chat_template: None,
            special_tokens_in_messages: false,
            weights: Vec::new(),
            validation_inputs: Vec::new(),
            extensions: Vec::new(),
            invalid_utf8: InvalidUtf8::Replace,
            validation_fraction: 0.05,
            num_threads: thread::available_parallelism()
                .map_or(NonZeroUsize::MIN, |cores| cores.min(THREADS_MAX)),
        }
    }

    /// Checks that inputs may have these weights: none, or one within [`WEIGHT_BOUNDS`](Self::WEIGHT_BOUNDS) for each of at most
    /// [`WEIGHTS_MAX`](Self::WEIGHTS_MAX) inputs.
    ///
    /// # Errors
    /// The mistake, in words.
    pub fn check_weights(weights: &[f64], inputs: &[PathBuf]) -> Result<(), String> {
        let (num_inputs, max) = (inputs.len(), Self::WEIGHTS_MAX);
        let (least, most) = (Self::WEIGHT_BOUNDS.start(), Self::WEIGHT_BOUNDS.end());
        if !weights.is_empty() && (weights.len() != num_inputs || num_inputs > max) {
            return Err(format!(
                "{} weights for {num_inputs} inputs; expected a number from {least:e} to {most:e} for each of at most {max} inputs, or none",
                weights.len()
            ));
        }
        match weights.iter().zip(inputs).find(|(weight, _)| !Self::WEIGHT_BOUNDS.contains(*weight)) {
            Some((weight, input)) => Err(format!(
                "the weight of {} is {weight}; expected a number from {least:e} to {most:e}",
                input.display()
            )),
            None => Ok(()),
        }
    }

    /// What a weight may be.
    pub const WEIGHT_BOUNDS: RangeInclusive<f64> = 1e-6..=1e6;

    /// The most inputs that may have weights.
    pub const WEIGHTS_MAX: usize = 1024;

    /// Whether one of the inputs can be read only once.
    pub(super) fn reads_stdin(&self) -> bool {
        self.inputs.iter().any(|input| input.as_os_str() == STDIN)
    }

    pub(super) fn check(&self) -> Result<(), DataError> {
        if !(0.0..1.0).contains(&self.validation_fraction) {
            return Err(DataError::ValidationFraction { fraction: self.validation_fraction });
        }
        if !self.validation_inputs.is_empty() && self.validation_fraction > 0.0 {
            return Err(DataError::TwoValidations { fraction: self.validation_fraction });
        }
        if self.validation_inputs.iter().any(|input| input.as_os_str() == STDIN) {
            return Err(DataError::StdinValidation);
        }
        Self::check_weights(&self.weights, &self.inputs).map_err(|mistake| DataError::Weights { mistake })?;
        if self.num_threads > THREADS_MAX {
            return Err(DataError::TooManyThreads {
                num_threads: self.num_threads.get(),
                num_threads_max: THREADS_MAX.get(),
            });
        }
        let (smallest, largest) = (BPE_VOCABULARY_SIZE_MIN, VOCABULARY_SIZE_MAX);
        match self.tokenizer {
            TokenizerChoice::TrainBpe { vocabulary_size }
                if !(smallest..=largest).contains(&vocabulary_size) =>
            {
                Err(DataError::BpeVocabulary { vocabulary_size, smallest, largest })
            }
            _ => Ok(()),
        }
    }
}
