//! The language model that a config describes.

use crate::config::{self, Architecture, Config, ModelSource};
use crate::error::TrainError;
use crate::weights::adapt_to_weights;
use std::fs;
use std::path::{Path, PathBuf};
use trireme_checkpoint::{CONFIG_FILE, ModelSource as WeightsSource, resolve_model};
use trireme_model::{ExchangeConfig, ModelConfig};

/// Returns the model that the config describes, for a corpus whose token ids are below `vocabulary_size`, and notices for the user.
///
/// # Errors
/// If the description of the model cannot be read or is not valid, if the weights to start from do not fit it, or if the model does not
/// support the vocabulary, the sequence length or the expert settings of the config.
pub fn model_config(
    config: &Config,
    vocabulary_size: usize,
) -> Result<(ModelConfig, Vec<String>), TrainError> {
    let (mut model, text) = match config.model_source() {
        ModelSource::Inline(architecture) => {
            (inline_model(config, architecture, vocabulary_size), String::new())
        }
        ModelSource::File(path) | ModelSource::InitFrom(path) => {
            let (path, text) = description(config, path)?;
            let refused = |source| TrainError::ModelConfig { path, source };
            (ModelConfig::from_json(&text).map_err(refused)?, text)
        }
    };
    let mut notices: Vec<String> = dropout_notice(config, &text).into_iter().collect();
    // Planning needs no weights. A command that needs them reports the error.
    if let Some(Ok(source)) = config.model().init_from.as_ref().map(|path| WeightsSource::open(path)) {
        notices.extend(adapt_to_weights(&mut model, &text, &source.weights())?);
    }
    if vocabulary_size > model.vocab_size {
        let folder = config.data().folder.clone();
        return Err(TrainError::VocabularyTooSmall {
            folder,
            tokenizer: vocabulary_size,
            model: model.vocab_size,
        });
    }
    model.dropout = config.model().dropout as f32;
    let experts = config.experts();
    match &mut model.experts {
        Some(own) => {
            own.balance_loss = experts.balance_loss.map_or(own.balance_loss, |weight| weight as f32);
            own.z_loss = experts.z_loss.map_or(own.z_loss, |weight| weight as f32);
            own.capacity_factor = experts.capacity_factor;
            let (num_shadowed, num_experts) = (experts.num_shadowed, own.num_experts);
            own.exchange = ExchangeConfig { num_chunks: experts.num_chunks, num_shadowed };
            if num_shadowed > num_experts {
                return Err(TrainError::TooManyShadowed { num_shadowed, num_experts });
            }
            if !own.has_bias && experts.bias_update_rate != config::Experts::default().bias_update_rate {
                return Err(TrainError::NoExpertBias { family: model.family.name() });
            }
        }
        None if *experts != config::Experts::default() => {
            return Err(TrainError::NoExperts { family: model.family.name() });
        }
        None => {}
    }
    let seq_len = config.training().seq_len;
    let max_position_embeddings = model.max_positions();
    if seq_len > max_position_embeddings {
        return Err(TrainError::SequenceTooLong { seq_len, max_position_embeddings });
    }
    Ok((model, notices))
}

/// Returns a notice that the dropout of a model's `config.json` is ignored, unless the config sets dropout.
fn dropout_notice(config: &Config, text: &str) -> Option<String> {
    let keys = ModelConfig::dropout_keys(text);
    (config.model().dropout == 0.0 && !keys.is_empty()).then(|| {
        format!(
            "the model's config.json has {}; training uses no dropout unless [model] dropout is set",
            keys.join(", ")
        )
    })
}

/// Returns the path and the text of the `config.json` that describes the model of `[model] config` or `init_from`.
fn description(config: &Config, path: &Path) -> Result<(PathBuf, String), TrainError> {
    let read = |path: PathBuf| match fs::read_to_string(&path) {
        Ok(text) => Ok((path, text)),
        Err(source) => Err(TrainError::ReadModelConfig { path, source }),
    };
    if let ModelSource::File(path) = config.model_source() {
        return read(if path.is_dir() { path.join(CONFIG_FILE) } else { path.to_owned() });
    }
    // Planning needs no weights, so a `config.json` without weights is enough.
    let alone = resolve_model(path)?.join(CONFIG_FILE);
    if alone.is_file() {
        return read(alone);
    }
    let missing = || TrainError::NoModelConfig { path: path.to_owned() };
    let source = WeightsSource::open(path)?;
    let text = source.read_file(CONFIG_FILE)?.ok_or_else(missing)?;
    Ok((source.path().join(CONFIG_FILE), String::from_utf8_lossy(&text).into_owned()))
}

/// Returns the `config.json` of `model` for checkpoints. It keeps the other keys of the `config.json` from which the model was read.
pub(crate) fn model_config_json(config: &Config, model: &ModelConfig) -> Result<String, TrainError> {
    match config.model_source() {
        ModelSource::Inline(_) => Ok(format!("{:#}\n", model.to_json())),
        ModelSource::File(path) | ModelSource::InitFrom(path) => {
            let (path, text) = description(config, path)?;
            model.updated_json(&text).map_err(|source| TrainError::ModelConfig { path, source })
        }
    }
}

fn inline_model(config: &Config, architecture: Architecture, vocabulary_size: usize) -> ModelConfig {
    let model = config.model();
    let base = match architecture {
        Architecture::Gpt2 => ModelConfig::gpt2(),
        Architecture::Llama => ModelConfig::llama(model.rope_theta),
    };
    ModelConfig {
        vocab_size: if model.vocab_size == 0 { vocabulary_size } else { model.vocab_size },
        hidden_size: model.hidden_size,
        num_layers: model.num_layers,
        num_heads: model.num_heads,
        num_kv_heads: model.num_kv_heads,
        head_dim: model.hidden_size / model.num_heads,
        intermediate_size: model.intermediate_size,
        max_position_embeddings: model.max_position_embeddings,
        norm_epsilon: model.norm_eps as f32,
        tie_word_embeddings: model.tie_word_embeddings,
        initializer_range: model.initializer_range as f32,
        ..base
    }
}
