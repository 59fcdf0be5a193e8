//! Language models: the task that a config describes with `[model]` and `[data]`.

use crate::config::Config;
use crate::corpus::checksum_of;
use crate::dataset::{Dataset, Sample};
use crate::error::TrainError;
use crate::pretrained::{Pretrained, check_tokenizer};
use crate::setup::{model_config, model_config_json};
use crate::task::{Task, TaskFile};
use serde_json::Value;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use trireme_base::DType;
use trireme_checkpoint::{CONFIG_FILE, Checkpoint};
use trireme_data::{Corpus, Sampler, TOKENIZER_CONFIG_FILE, TokenFile, Tokenizer};
use trireme_model::{DOCUMENT_STARTS, Model, ModelConfig, ModelError, TARGETS, TOKENS, TensorSpec};
use trireme_tensor::{Device, ParameterTable};

/// The name of the corpus' checksum in the identity of its samples.
pub(crate) const CORPUS: &str = "corpus";

/// The name of the tokenizer's hash in the identity of the samples.
pub(crate) const TOKENIZER: &str = "tokenizer";

/// A language model, and the corpus that it learns to predict.
#[derive(Debug)]
pub struct LanguageTask {
    model: ModelConfig,
    /// The model's `config.json`.
    model_json: String,
    notices: Vec<String>,
    tokenizer: Arc<Tokenizer>,
    tokenizer_sha256: Arc<str>,
    /// What else describes the model or its tokenizer to other programs.
    other_files: Vec<(&'static str, Vec<u8>)>,
    train: Arc<TokenFile>,
    validation: Option<Arc<TokenFile>>,
    seq_len: usize,
    /// The token that ends documents, which attention does not reach across; `None` if it does.
    document_end: Option<u32>,
}

impl LanguageTask {
    /// Opens the corpus of a config, and describes its model.
    ///
    /// # Errors
    /// If the corpus or the description of the model cannot be read, or they do not fit each other.
    pub fn open(config: &Config) -> Result<Self, TrainError> {
        let folder = &config.data().folder;
        let corpus = Corpus::open(folder)?;
        check_tokenizer(config, &corpus)?;
        let tokenizer_sha256 = corpus.tokenizer_sha256()?;
        let Corpus { train, validation, .. } = corpus;
        let (model, mut notices) = model_config(config, train.vocabulary_size())?;
        let pretrained = Pretrained::open(config)?;
        let own = pretrained.as_ref().map(|pretrained| pretrained.tokenizer_with(&tokenizer_sha256));
        let own = own.transpose()?.flatten();
        if pretrained.as_ref().is_some_and(Pretrained::has_no_tokenizer) && own.is_none() {
            notices.push(format!("cannot tell whether the model has the tokenizer of {}", folder.display()));
        }
        let (tokenizer, other_files) = match (own, &pretrained) {
            (Some(own), Some(pretrained)) => (Arc::clone(own), pretrained.files()?),
            _ => {
                let tokenizer = Tokenizer::load(folder)?;
                let config_json = tokenizer.config_json(model.max_position_embeddings).into_bytes();
                (Arc::new(tokenizer), vec![(TOKENIZER_CONFIG_FILE, config_json)])
            }
        };
        let model_json =
            model_config_json(config, &model, own.is_none().then(|| tokenizer.end_of_document()))?;
        let document_end = match config.data().mask_documents {
            true => Some(tokenizer.end_of_document().ok_or(TrainError::NoDocumentEnd)?),
            false => None,
        };
        Ok(LanguageTask {
            model_json,
            model,
            notices,
            tokenizer,
            tokenizer_sha256: tokenizer_sha256.into(),
            other_files,
            train: Arc::new(train),
            validation: validation.map(Arc::new),
            seq_len: config.training().seq_len,
            document_end,
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

    /// Windows of the sequences' length, and the token that follows.
    fn windows(&self, tokens: &Arc<TokenFile>, sampler: Sampler) -> TokenWindows {
        TokenWindows {
            tokens: Arc::clone(tokens),
            tokenizer_sha256: Arc::clone(&self.tokenizer_sha256),
            sampler,
            window: vec![0; self.seq_len + 1],
            document_end: self.document_end,
        }
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
        Ok(Box::new(self.windows(&self.train, sampler)))
    }

    fn validation_data(&self) -> Result<Option<Box<dyn Dataset>>, TrainError> {
        let Some(tokens) = &self.validation else { return Ok(None) };
        let sampler = Sampler::sequential(tokens.num_tokens(), self.seq_len)?;
        Ok(Some(Box::new(self.windows(tokens, sampler))))
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
    tokenizer_sha256: Arc<str>,
    sampler: Sampler,
    window: Vec<u32>,
    /// As [`LanguageTask::document_end`].
    document_end: Option<u32>,
}

impl TokenWindows {
    fn seq_len(&self) -> usize {
        self.window.len() - 1
    }
}

impl Dataset for TokenWindows {
    fn sample(&self) -> Vec<TensorSpec> {
        let names = [TOKENS, TARGETS].into_iter().chain(self.document_end.map(|_| DOCUMENT_STARTS));
        names.map(|name| TensorSpec::new(name, &[self.seq_len()], DType::U32)).collect()
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
            (TOKENIZER.to_owned(), self.tokenizer_sha256.to_string()),
            ("corpus_tokens".to_owned(), self.tokens.num_tokens().to_string()),
            ("seq_len".to_owned(), self.seq_len().to_string()),
        ])
    }

    fn read(&mut self, index: u64, sample: &mut Sample<'_>) -> Result<(), TrainError> {
        self.tokens.read_window(self.sampler.window(index).start, &mut self.window)?;
        let seq_len = self.seq_len();
        sample.u32s(TOKENS).copy_from_slice(&self.window[..seq_len]);
        sample.u32s(TARGETS).copy_from_slice(&self.window[1..]);
        if let Some(end) = self.document_end {
            write_document_starts(&self.window[..seq_len], end, sample.u32s(DOCUMENT_STARTS));
        }
        Ok(())
    }
}

/// Where the document of each token begins, if one ends with the token `end`.
fn write_document_starts(tokens: &[u32], end: u32, starts: &mut [u32]) {
    let mut start = 0;
    for (position, (token, out)) in tokens.iter().zip(starts).enumerate() {
        *out = start;
        if *token == end {
            start = position as u32 + 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_document_begins_after_the_token_that_ends_one() {
        let mut starts = [9; 7];
        write_document_starts(&[5, 0, 0, 7, 8, 0, 1], 0, &mut starts);
        assert_eq!(starts, [0, 0, 2, 3, 3, 3, 6]);
    }
}
