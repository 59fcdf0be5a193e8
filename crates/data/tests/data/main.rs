//! Preparation of corpora: records, texts, tokens.

mod common;
mod prepare;
mod records;
mod token_file;
mod tokenizers;
