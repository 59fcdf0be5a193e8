use crate::{
    DataError, MaskedTokens, PrepareReport, TRAIN_FILE, TRAIN_MASK_FILE, Tokenizer, VALIDATION_FILE,
    VALIDATION_MASK_FILE,
};
use std::path::{Path, PathBuf};

/// A prepared corpus, opened for training.
#[derive(Debug)]
pub struct Corpus {
    /// The folder that contains the corpus.
    pub folder: PathBuf,
    /// The training tokens.
    pub train: MaskedTokens,
    /// The validation tokens, if any were held out.
    pub validation: Option<MaskedTokens>,
    /// The report of the preparation.
    pub report: PrepareReport,
}

impl Corpus {
    /// Opens the corpus that [`prepare`](crate::prepare) wrote into `folder`. The tokenizer in the folder is not read,
    /// because training does not need it; use [`Tokenizer::load`](crate::Tokenizer::load).
    ///
    /// # Errors
    /// If the folder does not contain a complete corpus, or one of its files is damaged.
    pub fn open(folder: &Path) -> Result<Self, DataError> {
        let report = PrepareReport::read(folder)?;
        let open = |names| MaskedTokens::open(folder, names, report.has_loss_mask);
        let train = open([TRAIN_FILE, TRAIN_MASK_FILE])?;
        let validation =
            report.validation.map(|_| open([VALIDATION_FILE, VALIDATION_MASK_FILE])).transpose()?;
        Ok(Corpus { folder: folder.to_owned(), train, validation, report })
    }

    /// The tokens to evaluate a model on: the validation tokens, or the training tokens if none were held out.
    pub fn evaluation_tokens(&self) -> &MaskedTokens {
        self.validation.as_ref().unwrap_or(&self.train)
    }

    /// Returns the [`Tokenizer::sha256`] of the tokenizer that the corpus was prepared with.
    ///
    /// # Errors
    /// If the report does not contain the hash, as in earlier versions, and the tokenizer cannot be read.
    pub fn tokenizer_sha256(&self) -> Result<String, DataError> {
        match &self.report.tokenizer_sha256 {
            Some(sha256) => Ok(sha256.clone()),
            None => Tokenizer::load(&self.folder)?.sha256(),
        }
    }
}
