//! Tests of preparing corpora, and of token files and tokenizers.

mod common;
mod prepare;
mod records;
mod token_file;
mod tokenizers;
