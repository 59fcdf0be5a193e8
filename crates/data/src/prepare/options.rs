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

/// Maximum number of tokenizing threads. A single thread reads all input and cannot keep more threads busy.
const THREADS_MAX: NonZeroUsize = NonZeroUsize::new(256).expect("256 is not 0");

/// The tokenizer of a corpus.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenizerChoice {
    /// One token for each byte: [`Tokenizer::bytes`](crate::Tokenizer::bytes).
    Bytes,
    /// The path of a Hugging Face `tokenizer.json`.
    File(PathBuf),
    /// The tokenizer of a model.
    OfModel {
        /// The model, as the user specified it.
        model: PathBuf,
        /// The tokenizer that is stored with the model.
        tokenizer: Arc<Tokenizer>,
    },
    /// A byte-level BPE that is trained on the corpus itself. If the corpus is larger than 128 MiB, evenly spaced parts
    /// of it are used.
    TrainBpe {
        /// Maximum number of tokens, including the 256 bytes and `<|endoftext|>`.
        vocabulary_size: usize,
    },
}

impl TokenizerChoice {
    /// Returns the minimum size of the vocabulary. It is exact unless the tokenizer is trained on the corpus.
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

/// The inputs, output and settings of [`prepare`](crate::prepare).
#[derive(Debug, Clone, PartialEq)]
pub struct PrepareOptions {
    /// Text files, JSON Lines files (`.jsonl`, `.ndjson`, `.json`), Parquet files (`.parquet`, with the feature
    /// `parquet`) and folders, read in this order; `-` is the standard input. Files may be compressed (`.gz`, `.zst`).
    /// Each input is a separate source.
    ///
    /// Folders are searched recursively, in the order of names. Hidden entries, folders named `target`, symbolic links
    /// and binary files in them are skipped.
    pub inputs: Vec<PathBuf>,
    /// The output folder, created if it does not exist.
    pub out: PathBuf,
    /// The tokenizer of the corpus.
    pub tokenizer: TokenizerChoice,
    /// The name of the JSON field that contains the text of a record.
    pub field: String,
    /// Formats conversations as text. Without it, a conversation is an error.
    pub chat_template: Option<ChatTemplate>,
    /// Whether the names of special tokens in messages are encoded as these tokens. Otherwise they are plain text.
    pub special_tokens_in_messages: bool,
    /// Relative sampling weight of each input. If empty, inputs are sampled in proportion to their tokens.
    pub weights: Vec<f64>,
    /// Inputs to validate on, in the same forms as [`inputs`](Self::inputs), instead of holding out a fraction of the
    /// inputs.
    pub validation_inputs: Vec<PathBuf>,
    /// File extensions without the dot. If any are given, only files with one of them are read from folders.
    pub extensions: Vec<String>,
    /// The treatment of bytes that are not valid UTF-8.
    pub invalid_utf8: InvalidUtf8,
    /// The fraction of tokens to hold out for validation, in `0..1`.
    pub validation_fraction: f64,
    /// Number of tokenizing threads, at most 256. It does not affect the output.
    pub num_threads: NonZeroUsize,
}

impl PrepareOptions {
    /// Creates options with defaults: the bytes tokenizer, the field `text`, all extensions, invalid UTF-8 replaced, 5
    /// % of the tokens held out, and one thread for each core.
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

    /// Checks the weights of the inputs. There must be no weights at all, or one weight within
    /// [`WEIGHT_BOUNDS`](Self::WEIGHT_BOUNDS) for each of at most [`WEIGHTS_MAX`](Self::WEIGHTS_MAX) inputs.
    ///
    /// # Errors
    /// A description of the mistake.
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

    /// The range of valid weights.
    pub const WEIGHT_BOUNDS: RangeInclusive<f64> = 1e-6..=1e6;

    /// The maximum number of inputs with weights.
    pub const WEIGHTS_MAX: usize = 1024;

    /// Whether the standard input, which can be read only once, is among the inputs.
    pub(super) fn reads_stdin(&self) -> bool {
        self.inputs.iter().any(|input| input.as_os_str() == STDIN)
    }

    pub(super) fn check(&self) -> Result<(), DataError> {
        if !(0.0..1.0).contains(&self.validation_fraction) {
            return Err(DataError::ValidationFraction { fraction: self.validation_fraction });
        }
        if !self.validation_inputs.is_empty() && self.validation_fraction > 0.0 {
            return Err(DataError::ConflictingValidation { fraction: self.validation_fraction });
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
