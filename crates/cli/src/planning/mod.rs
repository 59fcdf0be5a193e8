//! Plans of a run before it starts: `train` describes the run, the planner predicts its memory and time.

mod alternatives;
mod host_bytes;
mod kernel_timer;
mod limits;
mod plan;
mod planned_run;
mod planned_schedule;
mod probe;
mod report;
mod sizes;

#[cfg(test)]
mod tests;

pub(crate) use alternatives::changes;
pub(crate) use plan::{Limit, Plan, PredictedTime, open_choices};
pub(crate) use planned_run::{ConfigSource, PlannedRun, Workers, Workload};
pub(crate) use planned_schedule::PlannedSchedule;

use anyhow::Result;
use trireme_data::{Corpus, PrepareReport, Tokenizer};
use trireme_model::ModelConfig;
use trireme_train::config::{self, Config, ModelSource};
use trireme_train::{SequenceFormat, model_config};

pub(crate) fn language_model(config: &Config) -> Result<ModelConfig> {
    Ok(model_config(config, vocabulary_size(config)?)?.0)
}

/// Returns the sequence format of the config's corpus. If there is no corpus yet, all tokens are assumed to be learned.
pub(crate) fn sequences_of(config: &Config) -> SequenceFormat {
    let corpus = PrepareReport::read(&config.data().folder);
    SequenceFormat::new(config, corpus.is_ok_and(|report| report.has_loss_mask))
}

/// Returns the vocabulary size of the config's corpus, or the size that it will have once it is prepared.
fn vocabulary_size(config: &Config) -> Result<usize> {
    let data = config.data();
    if let Ok(corpus) = Corpus::open(&data.folder) {
        return Ok(corpus.train.tokens.vocabulary_size());
    }
    let is_known = match config.model_source() {
        ModelSource::Inline(_) => config.model().vocab_size > 0,
        ModelSource::File(_) | ModelSource::InitFrom(_) => true,
    };
    Ok(match (&data.tokenizer, data.train_bpe) {
        // The vocabulary size of the model is used instead, and is at least as large.
        _ if is_known => 0,
        (_, vocabulary_size @ 1..) => vocabulary_size,
        (config::Tokenizer::Bytes, 0) => Tokenizer::bytes().vocabulary_size(),
        (config::Tokenizer::Auto, 0) if config.model().init_from.is_none() => {
            Tokenizer::bytes().vocabulary_size()
        }
        (config::Tokenizer::Auto | config::Tokenizer::File(_), 0) => {
            anyhow::bail!(
                "the vocabulary size is unknown until the text is prepared: run `trireme prepare` first, or set \
                 [model] vocab_size"
            )
        }
    })
}
