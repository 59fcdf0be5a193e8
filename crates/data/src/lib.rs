//! Tokenizers, token files and deterministic samplers: from text on disk to the tokens of sample `i`.
//!
//! [`prepare`] tokenizes text files, folders and JSON Lines files into a [`Corpus`]: one or two [`TokenFile`]s and the
//! [`Tokenizer`] that made them. A [`Sampler`] maps the index of a sample in the run to a window of a token file,
//! independently of the number of ranks, and [`TokenFile::read_window`] reads the tokens. [`bigram_baseline`] is a loss
//! that a trained model should beat.
//!
//! Input files are not trusted. Lengths in a file never determine how much memory is allocated, damage is detected
//! before a token is used, and every output is either complete or absent.

mod baseline;
mod chat;
mod corpus;
mod error;
mod files;
mod masked_tokens;
mod messages;
mod multiple_choice;
mod prepare;
mod sampler;
mod token_file;
mod tokenizer;

pub use baseline::bigram_baseline;
pub use chat::{
    AnnotatedText, CHAT_TEMPLATE_BYTES_MAX, CHAT_TEMPLATE_FILE, ChatTemplate, ConversationDocuments, Prompt,
    isolate_chat_templates, serve_chat_template,
};
pub use corpus::Corpus;
pub use error::DataError;
pub use masked_tokens::MaskedTokens;
pub use messages::with_text_contents;
pub use multiple_choice::{ChoiceTokens, Question};
pub use prepare::{
    ConvertedFormats, ExistingCorpus, InvalidUtf8, NoProgress, Phase, PrepareOptions, PrepareReport,
    Progress, REPORT_FILE, Skipped, Source, SplitSize, StagedCorpus, TRAIN_FILE, TRAIN_MASK_FILE,
    TokenizerChoice, VALIDATION_FILE, VALIDATION_MASK_FILE, check_inputs, has_no_corpus, is_up_to_date,
    prepare, stage,
};
pub use sampler::{Packing, Sampler, Shuffle, Window};
pub use token_file::{TokenFile, TokenFileWriter, VOCABULARY_SIZE_MAX};
pub use tokenizer::{BYTES_TOKENIZER_FILE, StreamDecoder, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE, Tokenizer};
