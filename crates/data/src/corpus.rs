use crate::{
    DataError, PrepareReport, TRAIN_FILE, TRAIN_MASK_FILE, TokenFile, Tokenizer, VALIDATION_FILE,
    VALIDATION_MASK_FILE,
};
use std::path::{Path, PathBuf};

/// A prepared corpus, opened for training.
#[derive(Debug)]
pub struct Corpus {
    /// Where it is.
    pub folder: PathBuf,
    /// The tokens to train on.
    pub train: TokenFile,
    /// The tokens held out, if any were.
    pub validation: Option<TokenFile>,
    /// Which of the tokens to train on are to be learned, if not all are: 1, or 0 for those that are only read.
    pub train_mask: Option<TokenFile>,
    /// The same of those held out.
    pub validation_mask: Option<TokenFile>,
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
        let train = TokenFile::open(&folder.join(TRAIN_FILE))?;
        let validation =
            report.validation.map(|_| TokenFile::open(&folder.join(VALIDATION_FILE))).transpose()?;
        let mask = |name, tokens: Option<&TokenFile>| {
            let Some(tokens) = tokens.filter(|_| report.has_loss_mask) else { return Ok(None) };
            let mask = TokenFile::open(&folder.join(name))?;
            match mask.num_tokens() == tokens.num_tokens() && mask.vocabulary_size() == 2 {
                true => Ok(Some(mask)),
                false => Err(DataError::TokenFileDamaged {
                    path: folder.join(name),
                    what: "it is not the mask of the tokens beside it".to_owned(),
                }),
            }
        };
        let train_mask = mask(TRAIN_MASK_FILE, Some(&train))?;
        let validation_mask = mask(VALIDATION_MASK_FILE, validation.as_ref())?;
        Ok(Corpus { folder: folder.to_owned(), train, validation, train_mask, validation_mask, report })
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
