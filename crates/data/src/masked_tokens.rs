use crate::{DataError, TokenFile};
use std::path::Path;
use std::sync::Arc;

/// Tokens with an optional loss mask.
#[derive(Debug, Clone)]
pub struct MaskedTokens {
    /// The tokens.
    pub tokens: Arc<TokenFile>,
    /// A file with 1 for each token that counts in the loss and 0 for the others; `None` if all tokens count.
    pub loss_mask: Option<Arc<TokenFile>>,
}

impl MaskedTokens {
    /// Opens a token file and, if the corpus has loss masks, its mask from the folder of a corpus.
    pub(crate) fn open(
        folder: &Path,
        [name, mask_name]: [&str; 2],
        has_loss_mask: bool,
    ) -> Result<Self, DataError> {
        let tokens = TokenFile::open(&folder.join(name))?;
        let open_mask = || {
            let path = folder.join(mask_name);
            let mask = TokenFile::open(&path)?;
            if (mask.num_tokens(), mask.vocabulary_size()) == (tokens.num_tokens(), 2) {
                return Ok(Arc::new(mask));
            }
            let what = "it is not the mask of the tokens next to it".to_owned();
            Err(DataError::TokenFileDamaged { path, what })
        };
        let loss_mask = has_loss_mask.then(open_mask).transpose()?;
        Ok(MaskedTokens { tokens: Arc::new(tokens), loss_mask })
    }

    /// Reads the loss mask of the tokens from index `start` on into `counted`: 1 for tokens that count, 0 for the others.
    /// `document_starts`, if given, is the result of [`TokenFile::document_starts`] for the same tokens. Then the first of these tokens in
    /// each document does not count, because no token of its document precedes it here.
    ///
    /// # Errors
    /// If the mask cannot be read.
    pub fn read_loss_mask(
        &self,
        start: u64,
        document_starts: Option<&[u32]>,
        counted: &mut [u32],
    ) -> Result<(), DataError> {
        match &self.loss_mask {
            Some(loss_mask) => loss_mask.read_window(start, counted)?,
            None => counted.fill(1),
        }
        let starts = document_starts.into_iter().flatten().enumerate();
        for (place, _) in starts.filter(|&(place, &start)| place == start as usize) {
            counted[place] = 0;
        }
        Ok(())
    }
}
