//! Language models: the task that `[model]` and `[data]` of a config describe.

use crate::checkpointing::TOKENIZER;
use crate::config::{self, Config};
use crate::corpus::corpus_identity;
use crate::dataset::{Dataset, Sample};
use crate::error::TrainError;
use crate::model_config::{model_config, model_config_json};
use crate::pretrained::{Pretrained, check_tokenizer};
use crate::task::{Task, TaskFile};
use serde_json::Value;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use trireme_base::{DType, json_text, parse_json, read_at_most};
use trireme_checkpoint::{CONFIG_FILE, Checkpoint};
use trireme_data::{
    CHAT_TEMPLATE_BYTES_MAX, CHAT_TEMPLATE_FILE, Corpus, DataError, MaskedTokens, Packing, Sampler, Source,
    TOKENIZER_CONFIG_FILE, TokenFile, Tokenizer, Window,
};
use trireme_model::{
    DOCUMENT_STARTS, LOSS_WEIGHTS, Model, ModelConfig, ModelError, TARGETS, TOKEN_WEIGHTS, TOKENS, TensorSpec,
};
use trireme_tensor::{Device, ParameterTable};

/// A language model and the corpus that it is trained on.
#[derive(Debug)]
pub struct LanguageTask {
    model: ModelConfig,
    model_json: String,
    notices: Vec<String>,
    tokenizer: Arc<Tokenizer>,
    tokenizer_sha256: Arc<str>,
    /// Other files that describe the model or its tokenizer to other programs.
    other_files: Vec<(&'static str, Vec<u8>)>,
    train: MaskedTokens,
    validation: Option<MaskedTokens>,
    sources: Vec<Source>,
    sequences: SequenceFormat,
    /// Whether only the answers in the corpus contribute to the loss.
    learns_answers: bool,
}

/// The form in which a corpus is divided into sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SequenceFormat {
    /// Number of tokens per sequence.
    pub seq_len: usize,
    packing: Packing,
    /// Whether tokens attend only to their own document.
    masks_documents: bool,
    /// Whether tokens have different weights in the loss.
    weighs_losses: bool,
}

impl SequenceFormat {
    /// Returns the form that the config gives to the sequences of a corpus, with or without a loss mask.
    pub fn new(config: &Config, has_loss_mask: bool) -> Self {
        let data = config.data();
        let packing = match data.packing {
            config::Packing::Auto if has_loss_mask => Packing::Documents,
            config::Packing::Auto | config::Packing::Stream => Packing::Stream,
            config::Packing::Documents => Packing::Documents,
        };
        let packs_documents = packing == Packing::Documents;
        SequenceFormat {
            seq_len: config.training().seq_len,
            packing,
            masks_documents: data.mask_documents || packs_documents,
            // Padding has weight 0.
            weighs_losses: has_loss_mask || packs_documents,
        }
    }

    /// Returns the form with packed documents, attention within documents, and loss weights.
    pub(crate) fn weighted(seq_len: usize) -> Self {
        SequenceFormat { seq_len, packing: Packing::Documents, masks_documents: true, weighs_losses: true }
    }

    /// Returns the number of samples in held-out tokens.
    ///
    /// # Errors
    /// If there are too few tokens.
    pub fn num_validation_samples(&self, tokens: &TokenFile) -> Result<u64, TrainError> {
        Ok(Sampler::new(tokens, &[], self.seq_len, self.packing, None)?.num_windows())
    }

    /// Returns the minimum number of tokens from which a sequence can be made. Windows of whole documents are padded.
    pub fn num_tokens_min(&self) -> u64 {
        match self.packing {
            Packing::Stream => self.seq_len as u64 + 1,
            Packing::Documents => 2,
        }
    }

    /// Returns the tensors of a sample, each of shape `[seq_len]`.
    pub fn sample(&self) -> Vec<TensorSpec> {
        let starts = self.masks_documents.then_some((DOCUMENT_STARTS, DType::U32));
        let weights = self.weighs_losses.then_some((LOSS_WEIGHTS, DType::F32));
        let of_tokens = self.has_padding().then_some((TOKEN_WEIGHTS, DType::F32));
        let tokens = [(TOKENS, DType::U32), (TARGETS, DType::U32)].into_iter();
        let all = tokens.chain(starts).chain(weights).chain(of_tokens);
        all.map(|(name, dtype)| TensorSpec::new(name, &[self.seq_len], dtype)).collect()
    }

    fn has_padding(&self) -> bool {
        self.packing == Packing::Documents
    }

    /// Returns the sampler of the training tokens of a corpus, shuffled with `seed`.
    ///
    /// # Errors
    /// If there are too few tokens.
    pub fn sampler(&self, corpus: &Corpus, seed: u64) -> Result<Sampler, TrainError> {
        let (tokens, sources) = (&corpus.train.tokens, &corpus.report.sources);
        Ok(Sampler::new(tokens, sources, self.seq_len, self.packing, Some(seed))?)
    }
}

impl LanguageTask {
    /// Opens the corpus of a config, and reads the description of its model.
    ///
    /// # Errors
    /// If the corpus or the description cannot be read, or if they do not fit each other.
    pub fn open(config: &Config) -> Result<Self, TrainError> {
        let folder = &config.data().folder;
        let corpus = Corpus::open(folder)?;
        let pretrained = Pretrained::open(config)?;
        check_tokenizer(config, pretrained.as_ref(), &corpus)?;
        let tokenizer_sha256 = corpus.tokenizer_sha256()?;
        let Corpus { train, validation, report, .. } = corpus;
        let (model, mut notices) = model_config(config, train.tokens.vocabulary_size())?;
        if pretrained.as_ref().is_some_and(|pretrained| pretrained.tokenizer.is_none())
            && !config.model().allow_other_tokenizer
        {
            notices.push(format!("cannot tell whether the model has the tokenizer of {}", folder.display()));
        }
        let unused = config.data_keys_without_effect();
        if !unused.is_empty() {
            let (keys, folder) = (unused.join(", "), folder.display());
            notices.push(format!(
                "without effect in [data]: {keys}; the tokens in {folder} are used as they were prepared"
            ));
        }
        notices.extend(report.notes());
        if report.num_literal_names > 0 {
            notices.push(
                "[data] special_tokens_in_messages says what names of special tokens in messages are"
                    .to_owned(),
            );
        }
        let own = pretrained.as_ref().map(|pretrained| pretrained.tokenizer_with(&tokenizer_sha256));
        let own = own.transpose()?.flatten();
        let tokenizer = match own {
            Some(own) => Arc::clone(own),
            None => Arc::new(Tokenizer::load(folder)?),
        };
        let mut other_files = match &pretrained {
            Some(pretrained) if own.is_some() => pretrained.files()?,
            _ => {
                let config_json = tokenizer.config_json(model.max_position_embeddings);
                vec![(TOKENIZER_CONFIG_FILE, config_json.into_bytes())]
            }
        };
        if let Some(template) = chat_template_of(folder)? {
            other_files.retain(|(name, _)| *name != CHAT_TEMPLATE_FILE);
            other_files.push((CHAT_TEMPLATE_FILE, template));
        }
        let mut model_json = model_config_json(config, &model)?;
        if own.is_none() {
            model_json = with_bos_and_eos_ids(&model_json, &tokenizer);
        }
        Ok(LanguageTask {
            model_json,
            model,
            notices,
            tokenizer,
            tokenizer_sha256: tokenizer_sha256.into(),
            other_files,
            train,
            validation,
            sources: report.sources,
            sequences: SequenceFormat::new(config, report.has_loss_mask),
            learns_answers: report.has_loss_mask,
        })
    }

    /// Returns the config from which the model is built.
    pub fn model_config(&self) -> &ModelConfig {
        &self.model
    }

    /// Returns whether only the answers in the corpus (conversations or completions) contribute to the loss.
    pub fn learns_answers(&self) -> bool {
        self.learns_answers
    }

    /// Returns the tokenizer of the corpus.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Returns windows of `tokens`, shuffled with `seed` if there is one, and sampled from weighted `sources`.
    fn windows(
        &self,
        tokens: &MaskedTokens,
        sources: &[Source],
        seed: Option<u64>,
    ) -> Result<Box<dyn Dataset>, TrainError> {
        let tokenizer_sha256 = Arc::clone(&self.tokenizer_sha256);
        Ok(Box::new(TokenWindows::new(tokens, tokenizer_sha256, sources, self.sequences, seed)?))
    }

    /// Returns the training tokens and the held-out tokens.
    pub fn tokens(&self) -> (&TokenFile, Option<&TokenFile>) {
        (&self.train.tokens, self.validation.as_ref().map(|validation| &*validation.tokens))
    }
}

impl Task for LanguageTask {
    fn description(&self) -> String {
        let model = &self.model;
        format!(
            "{} with {} layers of width {}, {} heads, vocabulary {}",
            model.family.name(),
            model.num_layers,
            model.hidden_size,
            model.num_heads,
            model.vocab_size
        )
    }

    fn build(&self, device: &Device, table: ParameterTable) -> Result<Model, ModelError> {
        self.model.build_into(table, self.sequences.seq_len, device)
    }

    fn train_data(&self, seed: u64) -> Result<Box<dyn Dataset>, TrainError> {
        self.windows(&self.train, &self.sources, Some(seed))
    }

    fn validation_data(&self) -> Result<Option<Box<dyn Dataset>>, TrainError> {
        self.validation.as_ref().map(|tokens| self.windows(tokens, &[], None)).transpose()
    }

    fn has_positions(&self) -> bool {
        true
    }

    fn notices(&self) -> Vec<String> {
        self.notices.clone()
    }

    fn facts(&self) -> Vec<(String, String)> {
        let mut facts = vec![("tokenizer".to_owned(), self.tokenizer_sha256.to_string())];
        if let Value::Object(members) = self.model.to_json() {
            facts.extend(members.iter().map(|(name, value)| (format!("model's {name}"), value.to_string())));
        }
        facts
    }

    fn files(&self) -> Vec<TaskFile<'_>> {
        let own = [(CONFIG_FILE, self.model_json.as_bytes()), self.tokenizer.file()];
        let others = self.other_files.iter().map(|(name, contents)| (*name, &contents[..]));
        let file = |(name, contents)| TaskFile { name, contents: Cow::Borrowed(contents) };
        own.into_iter().chain(others).map(file).collect()
    }

    /// Refuses a checkpoint with another model. Settings of dropout, initialization and the training of experts may differ, and so may the
    /// maximum sequence length unless the model depends on it.
    fn check(&self, checkpoint: &Checkpoint) -> Result<(), TrainError> {
        let path = checkpoint.path().join(CONFIG_FILE);
        let Some(text) = checkpoint.read_file(CONFIG_FILE)? else { return Ok(()) };
        let found = ModelConfig::from_json(&String::from_utf8_lossy(&text))
            .map_err(|source| TrainError::ModelConfig { path, source })?;
        let differences = found.differences(&self.model);
        if differences.is_empty() {
            return Ok(());
        }
        Err(TrainError::ResumedModelDiffers { path: checkpoint.path().to_owned(), differences })
    }
}

/// Returns a `config.json` with the tokenizer's tokens for the beginning and the end of a document, unless the model defines them.
fn with_bos_and_eos_ids(model_json: &str, tokenizer: &Tokenizer) -> String {
    let mut json = parse_json(model_json.as_bytes()).expect("it describes a model");
    let end = tokenizer.end_of_document();
    let beginning = tokenizer.prefix_tokens().first().copied().or(end);
    for (key, token) in [("bos_token_id", beginning), ("eos_token_id", end)] {
        if json[key].is_null() {
            json[key] = token.into();
        }
    }
    json_text(&json) + "\n"
}

fn chat_template_of(folder: &Path) -> Result<Option<Vec<u8>>, DataError> {
    let path = folder.join(CHAT_TEMPLATE_FILE);
    match read_at_most(&path, CHAT_TEMPLATE_BYTES_MAX as u64) {
        Ok(template) => Ok(Some(template)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(DataError::Read { path, source }),
    }
}

/// Windows of a token file, as samples for next-token prediction.
#[derive(Debug)]
pub(crate) struct TokenWindows {
    tokens: MaskedTokens,
    tokenizer_sha256: Arc<str>,
    sources: Vec<Source>,
    sampler: Sampler,
    sequences: SequenceFormat,
    window: Vec<u32>,
    /// For each token of the window, 1 if it counts in the loss, else 0.
    counted: Vec<u32>,
    /// For each token of the window, the index in the window at which its document begins.
    starts: Vec<u32>,
    /// The weight of each token that counts. It turns the mean over all tokens into the mean over tokens that count.
    loss_weight: f32,
    /// The weight of each token that is not padding. It turns the mean over all positions of the step into the mean over these tokens.
    token_weight: f32,
}

impl TokenWindows {
    /// Splits tokens into windows, which are shuffled with `seed` if there is one, and sampled from weighted `sources`.
    pub(crate) fn new(
        tokens: &MaskedTokens,
        tokenizer_sha256: Arc<str>,
        sources: &[Source],
        sequences: SequenceFormat,
        seed: Option<u64>,
    ) -> Result<Self, TrainError> {
        let window_len = sequences.seq_len + 1;
        Ok(TokenWindows {
            sampler: Sampler::new(&tokens.tokens, sources, sequences.seq_len, sequences.packing, seed)?,
            tokens: tokens.clone(),
            tokenizer_sha256,
            sources: sources.to_vec(),
            sequences,
            window: vec![0; window_len],
            counted: vec![1; window_len],
            starts: vec![0; window_len],
            loss_weight: 1.0,
            token_weight: 1.0,
        })
    }

    pub(crate) fn window(&self, index: u64) -> Window {
        self.sampler.window(index)
    }

    /// Returns, for each token of a window, the index at which its document begins, even if attention crosses the borders of documents.
    pub(crate) fn document_starts(&self, window: Window) -> Result<Vec<u32>, TrainError> {
        let mut starts = vec![0; window.len];
        self.tokens.tokens.document_starts(window.start, &mut starts)?;
        Ok(starts)
    }

    /// Returns the number of tokens of the sample with this index that contribute to the loss.
    pub(crate) fn num_counted(&mut self, index: u64) -> Result<u64, TrainError> {
        self.read_window(index, false)?;
        Ok(self.counted[1..].iter().map(|&counted| u64::from(counted)).sum())
    }

    /// Reads which tokens of a window count in the loss, where documents begin and, if `reads_tokens`, the tokens themselves. Padding forms
    /// a document of its own.
    fn read_window(&mut self, index: u64, reads_tokens: bool) -> Result<(), TrainError> {
        let Window { start, len, .. } = self.sampler.window(index);
        let file = &self.tokens.tokens;
        if reads_tokens {
            file.read_window(start, &mut self.window[..len])?;
            self.window[len..].fill(0);
        }
        if self.sequences.masks_documents {
            file.document_starts(start, &mut self.starts[..len])?;
            self.starts[len..].fill(len as u32);
        }
        if self.sequences.weighs_losses {
            let packs_documents = self.sequences.packing == Packing::Documents;
            let starts = packs_documents.then_some(&self.starts[..len]);
            self.tokens.read_loss_mask(start, starts, &mut self.counted[..len])?;
            self.counted[len..].fill(0);
        }
        Ok(())
    }
}

impl Dataset for TokenWindows {
    fn sample(&self) -> Vec<TensorSpec> {
        self.sequences.sample()
    }

    fn num_samples(&self) -> u64 {
        self.sampler.num_windows()
    }

    fn tokens_per_sample(&self) -> Option<u64> {
        Some(self.sequences.seq_len as u64)
    }

    fn identity(&self) -> BTreeMap<String, String> {
        let mut identity = corpus_identity(&self.tokens, &self.sources);
        identity.extend([
            (TOKENIZER.to_owned(), self.tokenizer_sha256.to_string()),
            ("corpus_tokens".to_owned(), self.tokens.tokens.num_tokens().to_string()),
            ("seq_len".to_owned(), self.sequences.seq_len.to_string()),
        ]);
        if self.sequences.packing == Packing::Documents {
            identity.insert("packing".to_owned(), "documents".to_owned());
        }
        identity
    }

    /// If only some tokens count in the loss, reads the loss mask of all these samples.
    fn announce_samples(&mut self, first: u64, num_samples: u64) -> Result<bool, TrainError> {
        if !self.sequences.weighs_losses {
            return Ok(true);
        }
        let (mut num_counted, mut num_unpadded) = (0, 0);
        for index in first..first + num_samples {
            num_counted += self.num_counted(index)?;
            num_unpadded += self.sampler.window(index).len.min(self.sequences.seq_len) as u64;
        }
        let num_tokens = num_samples * self.sequences.seq_len as u64;
        self.loss_weight = (num_tokens as f64 / num_counted.max(1) as f64) as f32;
        self.token_weight = (num_tokens as f64 / num_unpadded as f64) as f32;
        Ok(num_counted > 0)
    }

    fn read(&mut self, index: u64, sample: &mut Sample<'_>) -> Result<(), TrainError> {
        self.read_window(index, true)?;
        let seq_len = self.sequences.seq_len;
        sample.u32s(TOKENS).copy_from_slice(&self.window[..seq_len]);
        sample.u32s(TARGETS).copy_from_slice(&self.window[1..]);
        if self.sequences.masks_documents {
            sample.u32s(DOCUMENT_STARTS).copy_from_slice(&self.starts[..seq_len]);
        }
        if self.sequences.weighs_losses {
            let weights = sample.f32s(LOSS_WEIGHTS).iter_mut().zip(&self.counted[1..]);
            weights.for_each(|(weight, &counted)| *weight = counted as f32 * self.loss_weight);
        }
        if self.sequences.has_padding() {
            let num_unpadded = self.sampler.window(index).len.min(seq_len);
            let (tokens, padding) = sample.f32s(TOKEN_WEIGHTS).split_at_mut(num_unpadded);
            tokens.fill(self.token_weight);
            padding.fill(0.0);
        }
        Ok(())
    }
}
