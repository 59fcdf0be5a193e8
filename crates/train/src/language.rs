//! Language models: the task that a config describes with `[model]` and `[data]`.

use crate::config::Config;
use crate::corpus::checksum_of;
use crate::dataset::{Dataset, Sample};
use crate::error::TrainError;
use crate::setup::model_config;
use crate::task::{Task, TaskFile};
use serde_json::Value;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use trireme_base::DType;
use trireme_checkpoint::{CONFIG_FILE, Checkpoint};
use trireme_data::{Corpus, Sampler, TokenFile, Tokenizer};
use trireme_model::{Model, ModelConfig, ModelError, TARGETS, TOKENS, TensorSpec};
use trireme_tensor::{Device, ParameterTable};

/// The name of the corpus' checksum in the identity of its samples.
pub(crate) const CORPUS: &str = "corpus";

/// A language model, and the corpus that it learns to predict.
#[derive(Debug)]
pub struct LanguageTask {
    model: ModelConfig,
    /// The model's `config.json`.
    model_json: String,
    notices: Vec<String>,
    tokenizer: Tokenizer,
    train: Arc<TokenFile>,
    validation: Option<Arc<TokenFile>>,
    seq_len: usize,
}

impl LanguageTask {
    /// Opens the corpus of a config, and describes its model.
    ///
    /// # Errors
    /// If the corpus or the description of the model cannot be read, or they do not fit each other.
    pub fn open(config: &Config) -> Result<Self, TrainError> {
        let folder = &config.data().folder;
        let Corpus { train, validation, .. } = Corpus::open(folder)?;
        let tokenizer = Tokenizer::load(folder)?;
        let (model, notices) = model_config(config, train.vocabulary_size())?;
        Ok(LanguageTask {
            model_json: format!("{:#}\n", model.to_json()),
            model,
            notices,
            tokenizer,
            train: Arc::new(train),
            validation: validation.map(Arc::new),
            seq_len: config.training().seq_len,
        })
    }

    /// What the model is built from.
    pub fn model_config(&self) -> &ModelConfig {
        &self.model
    }

    /// The corpus' tokenizer.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// The tokens to train on, and those held out.
    pub fn tokens(&self) -> (&TokenFile, Option<&TokenFile>) {
        (&self.train, self.validation.as_deref())
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
        self.model.build_into(table, self.seq_len, device)
    }

    fn train_data(&self, seed: u64) -> Result<Box<dyn Dataset>, TrainError> {
        let sampler = Sampler::shuffled(self.train.num_tokens(), self.seq_len, seed)?;
        Ok(Box::new(TokenWindows::new(&self.train, self.seq_len, sampler)))
    }

    fn validation_data(&self) -> Result<Option<Box<dyn Dataset>>, TrainError> {
        let Some(tokens) = &self.validation else { return Ok(None) };
        let sampler = Sampler::sequential(tokens.num_tokens(), self.seq_len)?;
        Ok(Some(Box::new(TokenWindows::new(tokens, self.seq_len, sampler))))
    }

    fn notices(&self) -> Vec<String> {
        self.notices.clone()
    }

    fn facts(&self) -> Vec<(String, String)> {
        let (name, contents) = self.tokenizer.file();
        let tokenizer = format!("{name} with checksum {:08x}", crc32c::crc32c(contents));
        let mut facts = vec![("tokenizer".to_owned(), tokenizer)];
        if let Value::Object(members) = self.model.to_json() {
            facts.extend(members.iter().map(|(name, value)| (format!("model's {name}"), value.to_string())));
        }
        facts
    }

    fn files(&self) -> Vec<TaskFile<'_>> {
        let (name, contents) = self.tokenizer.file();
        vec![
            TaskFile { name: CONFIG_FILE, contents: Cow::Borrowed(self.model_json.as_bytes()) },
            TaskFile { name, contents: Cow::Borrowed(contents) },
        ]
    }

    /// Refuses a checkpoint whose model differs in more than its initial weights and, where no parameter depends on it, its longest
    /// sequence.
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

/// Windows of a token file, for models that predict the next token.
#[derive(Debug)]
struct TokenWindows {
    tokens: Arc<TokenFile>,
    sampler: Sampler,
    window: Vec<u32>,
}

impl TokenWindows {
    /// Windows of `seq_len` tokens and the one that follows.
    fn new(tokens: &Arc<TokenFile>, seq_len: usize, sampler: Sampler) -> Self {
        TokenWindows { tokens: Arc::clone(tokens), sampler, window: vec![0; seq_len + 1] }
    }

    fn seq_len(&self) -> usize {
        self.window.len() - 1
    }
}

impl Dataset for TokenWindows {
    fn sample(&self) -> Vec<TensorSpec> {
        [TOKENS, TARGETS].map(|name| TensorSpec::new(name, &[self.seq_len()], DType::U32)).into()
    }

    fn num_samples(&self) -> u64 {
        self.sampler.num_windows()
    }

    fn tokens_per_sample(&self) -> Option<u64> {
        Some(self.seq_len() as u64)
    }

    fn identity(&self) -> BTreeMap<String, String> {
        BTreeMap::from([
            (CORPUS.to_owned(), checksum_of(&self.tokens)),
            ("corpus_tokens".to_owned(), self.tokens.num_tokens().to_string()),
            ("seq_len".to_owned(), self.seq_len().to_string()),
        ])
    }

    fn read(&mut self, index: u64, sample: &mut Sample<'_>) -> Result<(), TrainError> {
        self.tokens.read_window(self.sampler.window(index).start, &mut self.window)?;
        let seq_len = self.seq_len();
        sample.u32s(TOKENS).copy_from_slice(&self.window[..seq_len]);
        sample.u32s(TARGETS).copy_from_slice(&self.window[1..]);
        Ok(())
    }
}
