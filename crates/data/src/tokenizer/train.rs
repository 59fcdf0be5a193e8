use super::{END_OF_DOCUMENT_NAMES, Tokenizer};
use crate::{DataError, VOCABULARY_SIZE_MAX};
use std::error::Error;
use std::io;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, models::TrainerWrapper};
use trireme_base::with_resource_limits;

/// The 256 bytes and the end-of-document token.
pub(crate) const BPE_VOCABULARY_SIZE_MIN: usize = 257;

impl Tokenizer {
    /// Trains a byte-level BPE tokenizer like GPT-2's (Sennrich, Haddow, Birch: "Neural machine translation of
    /// rare words with subword units", ACL 2016; over bytes: Radford et al., "Language models are unsupervised
    /// multitask learners", 2019). Id 0 is `<|endoftext|>`, ids 1 to 256 are the bytes, and the other ids are the
    /// merges in the order in which they were learned. A small text may give fewer than `vocabulary_size` tokens. The
    /// result does not depend on the order of the texts or the number of threads.
    ///
    /// Uses all cores, and memory proportional to the number of distinct words.
    ///
    /// # Errors
    /// If `vocabulary_size` is out of range, threads cannot be started, or the tokenizer library fails.
    pub fn train_bpe(
        texts: impl Iterator<Item = String> + Send,
        vocabulary_size: usize,
    ) -> Result<Self, DataError> {
        let (smallest, largest) = (BPE_VOCABULARY_SIZE_MIN, VOCABULARY_SIZE_MAX);
        if !(smallest..=largest).contains(&vocabulary_size) {
            return Err(DataError::BpeVocabulary { vocabulary_size, smallest, largest });
        }
        start_threads().map_err(|source| DataError::Spawn { source })?;
        train(texts, vocabulary_size)
            .and_then(Tokenizer::from_json)
            .map_err(|source| DataError::TrainTokenizer { source })
    }
}

/// Starts the threads that training uses. The tokenizer library would panic if the system refused them.
fn start_threads() -> io::Result<()> {
    // An error without a source means that the threads are already running.
    let Err(error) = rayon::ThreadPoolBuilder::new().build_global() else { return Ok(()) };
    match error.source().and_then(|source| source.downcast_ref::<io::Error>()) {
        Some(source) => Err(with_resource_limits(io::Error::new(source.kind(), error.to_string()))),
        None => Ok(()),
    }
}

fn train(
    texts: impl Iterator<Item = String> + Send,
    vocabulary_size: usize,
) -> Result<Vec<u8>, tokenizers::Error> {
    let byte_level = ByteLevel::default().add_prefix_space(false);
    let mut tokenizer = tokenizers::Tokenizer::new(BPE::default());
    tokenizer.with_pre_tokenizer(Some(byte_level)).with_decoder(Some(byte_level));
    let trainer = BpeTrainer::builder()
        .vocab_size(vocabulary_size)
        .min_frequency(2)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .special_tokens(vec![AddedToken::from(END_OF_DOCUMENT_NAMES[0], true)])
        .show_progress(false)
        .build();
    tokenizer.train(&mut TrainerWrapper::from(trainer), texts)?;
    Ok(tokenizer.to_string(true)?.into_bytes())
}
