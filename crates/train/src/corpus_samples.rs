//! Samples of a corpus as a model trains on them, for display.

use crate::config::Config;
use crate::dataset::{Dataset, Sample, batch_specs};
use crate::error::TrainError;
use crate::language::{SequenceFormat, TokenWindows};
use trireme_data::Corpus;
use trireme_model::{DOCUMENT_STARTS, HostBatch, LOSS_WEIGHTS, TARGETS, TOKENS};

/// The samples of a prepared corpus, in the order of a run.
#[derive(Debug)]
pub struct CorpusSamples {
    windows: TokenWindows,
    batch: HostBatch,
}

/// A sample as a model trains on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SampleView {
    /// The index of the first token in its file.
    pub start: u64,
    /// The inputs of the model, and the last target. Padding is left out.
    pub tokens: Vec<u32>,
    /// For each token, whether its prediction contributes to the loss. The first token is not predicted.
    pub is_learned: Vec<bool>,
    /// For each token, the index within the sample of the first token of its document.
    pub document_starts: Vec<u32>,
    /// Number of padding positions after the tokens.
    pub num_padding: usize,
}

impl SampleView {
    /// Returns whether this token is the first one of a document, or of the part of a document that the sample contains.
    pub fn begins_document(&self, token: usize) -> bool {
        self.document_starts[token] as usize == token
    }
}

impl CorpusSamples {
    /// Opens the samples of a corpus: those of its training tokens, or those of its held-out tokens if `is_validation`.
    ///
    /// # Errors
    /// If there are too few tokens for one sample, or none are held out.
    pub fn open(config: &Config, corpus: &Corpus, is_validation: bool) -> Result<Self, TrainError> {
        let sequences = SequenceFormat::new(config, corpus.report.has_loss_mask);
        let tokenizer = corpus.tokenizer_sha256()?.into();
        let windows = if is_validation {
            let no_validation = || TrainError::NoValidation { folder: corpus.folder.clone() };
            let tokens = corpus.validation.as_ref().ok_or_else(no_validation)?;
            TokenWindows::new(tokens, tokenizer, &[], sequences, None)?
        } else {
            let seed = Some(config.training().seed);
            TokenWindows::new(&corpus.train, tokenizer, &corpus.report.sources, sequences, seed)?
        };
        let batch = HostBatch::new(&batch_specs(&windows, 1));
        Ok(CorpusSamples { windows, batch })
    }

    /// Returns the number of samples of one pass over the data.
    pub fn num_samples(&self) -> u64 {
        self.windows.num_samples()
    }

    /// Returns whether tokens attend only to those of their own document.
    pub fn masks_documents(&self) -> bool {
        self.windows.sample().iter().any(|spec| spec.name == DOCUMENT_STARTS)
    }

    /// Reads the sample with this index in the run.
    ///
    /// # Errors
    /// If the files of the corpus cannot be read.
    pub fn read(&mut self, index: u64) -> Result<SampleView, TrainError> {
        let window = self.windows.window(index);
        self.windows.announce_samples(index, 1)?;
        let weighs_losses = self.windows.sample().iter().any(|spec| spec.name == LOSS_WEIGHTS);
        let mut sample = Sample { batch: &mut self.batch, row: 0 };
        self.windows.read(index, &mut sample)?;
        let mut tokens = sample.u32s(TOKENS).to_vec();
        tokens.extend(sample.u32s(TARGETS).last());
        let mut is_learned = vec![false];
        if weighs_losses {
            is_learned.extend(sample.f32s(LOSS_WEIGHTS).iter().map(|&weight| weight > 0.0))
        } else {
            is_learned.resize(tokens.len(), true)
        }
        let num_padding = tokens.len() - window.len;
        tokens.truncate(window.len);
        is_learned.truncate(window.len);
        let document_starts = self.windows.document_starts(window)?;
        Ok(SampleView { start: window.start, tokens, is_learned, document_starts, num_padding })
    }

    /// Returns the number of tokens of the sample with this index that contribute to the loss.
    ///
    /// # Errors
    /// The errors of [`read`](Self::read).
    pub fn num_learned(&mut self, index: u64) -> Result<u64, TrainError> {
        self.windows.num_counted(index)
    }
}
