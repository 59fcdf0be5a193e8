use crate::{DataError, TokenFile};
use std::path::Path;
use std::sync::Arc;

/// Tokens, and which of them count in the loss, if not all do.
#[derive(Debug, Clone)]
pub struct MaskedTokens {
    /// The tokens.
    pub tokens: Arc<TokenFile>,
    /// Of each token 1, or 0 if it is only read.
    pub loss_mask: Option<Arc<TokenFile>>,
}

impl MaskedTokens {
    /// Opens two files of a corpus' folder, of which the second one is there only if it `has_loss_mask`.
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
            let what = "it is not the mask of the tokens beside it".to_owned();
            Err(DataError::TokenFileDamaged { path, what })
        };
        let loss_mask = has_loss_mask.then(open_mask).transpose()?;
        Ok(MaskedTokens { tokens: Arc::new(tokens), loss_mask })
    }

    /// Reads which of the tokens from `start` on count in the loss: 1, or 0. If sequences attend to single documents, whose first tokens are in
    /// `document_starts`, nothing tells of a document's first token, so it does not count.
    ///
    /// # Errors
    /// If the mask cannot be read.
    pub fn read_counted(
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
