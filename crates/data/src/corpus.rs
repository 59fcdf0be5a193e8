use crate::{
    DataError, MaskedTokens, PrepareReport, TRAIN_FILE, TRAIN_MASK_FILE, Tokenizer, VALIDATION_FILE,
    VALIDATION_MASK_FILE,
};
use std::path::{Path, PathBuf};

/// A prepared corpus, opened for training.
#[derive(Debug)]
pub struct Corpus {
    /// Where it is.
    pub folder: PathBuf,
    /// The tokens to train on.
    pub train: MaskedTokens,
    /// The tokens held out, if any were.
    pub validation: Option<MaskedTokens>,
    /// How the corpus was made.
    pub report: PrepareReport,
}

impl Corpus {
    /// Opens what [`prepare`](crate::prepare) wrote into `folder`. The tokenizer beside it is not needed for
    /// training; [`Tokenizer::load`](crate::Tokenizer::load) reads it.
    ///
    /// # Errors
    /// If the folder holds no complete corpus, or a file of it is damaged.
    pub fn open(folder: &Path) -> Result<Self, DataError> {
        let report = PrepareReport::read(folder)?;
        let open = |names| MaskedTokens::open(folder, names, report.has_loss_mask);
        let train = open([TRAIN_FILE, TRAIN_MASK_FILE])?;
        let validation =
            report.validation.map(|_| open([VALIDATION_FILE, VALIDATION_MASK_FILE])).transpose()?;
        Ok(Corpus { folder: folder.to_owned(), train, validation, report })
    }

    /// What a model is evaluated on: what was held out, or all if nothing was.
    pub fn held_out(&self) -> &MaskedTokens {
        self.validation.as_ref().unwrap_or(&self.train)
    }

    /// The [`Tokenizer::sha256`] of the tokenizer that it was made with.
    ///
    /// # Errors
    /// If an earlier version made it, which did not note that, and the tokenizer cannot be read.
    pub fn tokenizer_sha256(&self) -> Result<String, DataError> {
        match &self.report.tokenizer_sha256 {
            Some(sha256) => Ok(sha256.clone()),
            None => Tokenizer::load(&self.folder)?.sha256(),
        }
    }
}
