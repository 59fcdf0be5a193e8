//! The configuration of a run: one TOML file, one validator.
//!
//! The file is read loosely, key by key; then the keys are held against each other. Either all is well and
//! there is a [`Config`], which cannot be wrong, or there is a list of all mistakes with their lines. What
//! keys there are is said once, in `sections.rs`.
//!
//! Values that stand for another key's (such as `global_batch_size = 0`) are resolved, so that the config
//! saved with a run tells all that counted.

mod checks;
mod choice;
mod compression;
mod costs;
mod explain;
mod file_values;
mod foreign_words;
mod given;
mod group_places;
mod layout;
mod load;
mod memory;
mod mistake;
mod optimizer;
mod pipeline;
mod reader;
mod section;
mod sections;
mod validate;
mod value;

#[cfg(test)]
mod tests;

pub use choice::{
    ActivationCheckpointMode, Architecture, Bind, Change, DeviceName, Fp8, HugePages, LogFormat, Packing,
    QuantizedGradients, Resume, Tier, Tokenizer,
};
pub use layout::{ActivationCheckpoint, Memory, Offload, Parallelism};
pub use mistake::{ConfigError, Mistake, Place};
pub use sections::{
    Checkpoint, Comm, Data, Experts, Generate, Launch, LrScheduler, Metrics, Model, Optimizer,
    OptimizerGroup, Run, Training,
};

pub use value::{ByteLimit, Interval};

pub(crate) use file_values::file_values;
pub(crate) use sections::FP8_AMAX_HISTORY_LEN_MAX;

use checks::changed_keys;
use group_places::GroupPlaces;
use memory::may_spill;
use mistake::nearest;
use section::Attribute;
use sections::Sections;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use trireme_base::{ContextPlace, Rank};
use trireme_parallel::Degrees;
use trireme_tensor::{ModelPlace, Precision};

/// The resolved configuration of a run; every value in it fits every other.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    subject: Subject,
    sections: Sections,
    world_size: usize,
    group_places: GroupPlaces,
}

/// What a config describes beside the training itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject {
    /// A language model and its text, in `[model]` and `[data]`.
    LanguageModel,
    /// Nothing: the program that reads the config has a [`Task`](crate::Task) of its own. Keys of language models are refused.
    OwnTask,
}

/// Where the description of the model is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelSource<'a> {
    /// In a Hugging Face `config.json` at this path.
    File(&'a Path),
    /// In the section `[model]` itself.
    Inline(Architecture),
    /// In the `config.json` of the directory that also holds the first weights.
    InitFrom(&'a Path),
}

impl Config {
    /// Every key as `section.key`, with its default, if it has one.
    pub(crate) fn defaults() -> BTreeMap<String, String> {
        let sections = Sections::default();
        let keys = sections.all().flat_map(|(name, section)| {
            section
                .keys()
                .into_iter()
                .filter_map(move |key| Some((format!("{name}.{}", key.name), key.value?.to_string())))
        });
        keys.collect()
    }

    /// Whether the key of this name, as `section.key`, affects training.
    pub(crate) fn affects_training(name: &str) -> bool {
        !sections::has_attribute(name, Attribute::NoEffectOnTraining)
    }

    /// Whether ranks may have different values of the key of this name, as `section.key`.
    pub(crate) fn may_differ(name: &str) -> bool {
        sections::has_attribute(name, Attribute::PerRank)
    }

    /// The same config, in which the workers that divide positions exchange them for heads as far as that sends fewer bytes than a ring, if it
    /// leaves that open: in a model with so many query heads and heads of keys and values.
    pub fn with_heads_chosen(mut self, num_heads: usize, num_kv_heads: usize) -> Self {
        let width = if self.training().dtype == Precision::F32 { 4.0 } else { 2.0 };
        let parallelism = &mut self.sections.parallelism;
        let (degree, tensor) = (parallelism.context_parallel_degree, parallelism.tensor_parallel_degree);
        if parallelism.context_parallel_heads_degree == 0 {
            let heads = [num_heads, num_kv_heads].map(|heads| heads.div_ceil(tensor));
            let sent = |heads_degree: &usize| bytes_sent(heads, degree, *heads_degree, width);
            let is_possible = |by: &usize| {
                degree.is_multiple_of(*by) && heads.iter().all(|heads| heads.is_multiple_of(*by))
            };
            let best = (1..=degree).filter(is_possible).min_by(|a, b| sent(a).total_cmp(&sent(b)));
            parallelism.context_parallel_heads_degree = best.unwrap_or(1);
        }
        self
    }

    /// The same config with the corpus in `folder`.
    pub fn with_data_folder(mut self, folder: PathBuf) -> Self {
        self.sections.data.folder = folder;
        self
    }

    /// Number of workers.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Workers that see different samples.
    pub fn data_parallel_degree(&self) -> usize {
        let Parallelism { context_parallel_degree, tensor_parallel_degree, .. } = *self.parallelism();
        self.workers_per_place() / (context_parallel_degree * tensor_parallel_degree)
    }

    /// Workers at each place of the pipeline.
    pub fn workers_per_place(&self) -> usize {
        self.world_size / self.parallelism().pipeline_parallel_degree
    }

    /// How the workers lie on the axes of a mesh.
    pub fn degrees(&self) -> Degrees {
        let parallelism = self.parallelism();
        Degrees {
            pipeline: parallelism.pipeline_parallel_degree,
            shards: self.num_shards(),
            context: parallelism.context_parallel_degree,
            heads: parallelism.context_parallel_heads_degree.max(1),
            tensor: parallelism.tensor_parallel_degree,
            experts: parallelism.expert_parallel_degree,
        }
    }

    /// Which of the workers that have the positions of a sequence a worker is.
    pub fn context_place(&self, rank: Rank) -> ContextPlace {
        self.degrees().context_place(rank)
    }

    /// Which part of the model a worker has.
    pub fn model_place(&self, rank: Rank) -> ModelPlace {
        self.degrees().model_place(rank)
    }

    /// Steps of a program: 1, unless the pipeline does not drain between steps.
    pub fn steps_per_program(&self) -> usize {
        match self.parallelism().is_asynchronous() {
            true => self.parallelism().pipeline_parallel_drain_interval as usize,
            false => 1,
        }
    }

    /// Whether activations of uneven loads of experts may go to files.
    pub fn may_spill(&self) -> bool {
        may_spill(self.parallelism(), self.experts(), self.memory())
    }

    /// Workers that shard one replica of the training state; 1 if nothing is sharded.
    pub fn num_shards(&self) -> usize {
        let Parallelism { data_parallel_shard_degree, context_parallel_degree, .. } = *self.parallelism();
        let shards = data_parallel_shard_degree as usize;
        if self.parallelism().state_layout().has_shards() { shards * context_parallel_degree } else { shards }
    }

    /// Microbatches that each worker computes in one step: the gradient accumulation.
    pub fn num_microbatches(&self) -> usize {
        let training = self.training();
        training.global_batch_size / (training.local_batch_size * self.data_parallel_degree())
    }

    /// Steps of a run that passes over so many samples as often as the config says; `None` if the config says how many steps.
    pub fn steps_of_epochs(&self, num_samples: u64) -> Option<u64> {
        let training = self.training();
        let samples = training.epochs * num_samples as f64;
        (training.epochs > 0.0).then(|| (samples / training.global_batch_size as f64).ceil() as u64)
    }

    /// Returns the keys of `[data]` that are set and have no effect, since the tokens in `folder` were prepared earlier. They are no mistake: a
    /// config may serve before and after its text is prepared.
    pub(crate) fn data_keys_without_effect(&self) -> Vec<&'static str> {
        let data = self.data();
        let is_used = |key: &&str| matches!(*key, "folder" | "packing" | "mask_documents");
        match data.inputs.is_empty() {
            true => changed_keys(data).filter(|key| !is_used(key)).collect(),
            false => Vec::new(),
        }
    }

    /// The run's folder.
    pub fn run_folder(&self) -> PathBuf {
        self.run().folder.join(&self.run().name)
    }

    /// Whether a checkpoint is saved at each new lowest validation loss.
    pub(crate) fn keeps_best(&self) -> bool {
        self.checkpoint().enable && self.checkpoint().keep_best && self.training().validation_interval > 0
    }

    /// What the config describes beside the training itself.
    pub fn subject(&self) -> Subject {
        self.subject
    }

    /// Where the description of the language model is.
    ///
    /// # Panics
    /// If the subject is no language model.
    pub fn model_source(&self) -> ModelSource<'_> {
        let model = self.model();
        match (&model.config, model.architecture, &model.init_from) {
            (Some(path), _, _) => ModelSource::File(path),
            (None, Some(architecture), _) => ModelSource::Inline(architecture),
            (None, None, Some(folder)) => ModelSource::InitFrom(folder),
            (None, None, None) => unreachable!("a config of a language model describes one"),
        }
    }
}

/// What a worker sends for each position that it has and each element of a head, in a block's forward and backward: bytes, where activations
/// have `width`. See docs/context.md.
fn bytes_sent([heads, kv_heads]: [usize; 2], degree: usize, heads_degree: usize, width: f64) -> f64 {
    let (ring, sharing) = ((degree / heads_degree) as f64, heads_degree as f64);
    let [heads, keys_values] = [heads as f64, 2.0 * kv_heads as f64];
    // Queries, keys and values, and the output; their gradients come back.
    let exchanged = 2.0 * (sharing - 1.0) / sharing * (2.0 * heads + keys_values) * width;
    let grads = if ring > 1.0 { ring * 4.0 } else { 0.0 };
    exchanged + keys_values * (2.0 * (ring - 1.0) * width + grads)
}
