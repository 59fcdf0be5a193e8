//! The configuration of a run: one TOML file, validated as a whole.
//!
//! The file is first read key by key; then the keys are checked against each other. The result is a [`Config`], whose values are valid and
//! consistent, or a list of all mistakes with their lines. `sections.rs` defines every key in one place.
//!
//! Values that refer to other keys (such as `global_batch_size = 0`) are resolved, so the config saved with a run contains every value that
//! the run used.

mod aliases;
mod checks;
mod choice;
mod compression;
mod costs;
mod explain;
mod file_values;
mod group_origins;
mod layout;
mod load;
mod memory;
mod mistake;
mod optimizer;
mod original;
mod pipeline;
mod reader;
mod section;
mod sections;
mod validate;
mod value;

#[cfg(test)]
mod tests;

pub use choice::{
    ActivationCheckpointMode, Architecture, Bind, Change, DeviceName, Fp8, HugePages, LogFormat, NcclUse,
    Packing, QuantizedGradients, Resume, Tier, Tokenizer,
};
pub use layout::{ActivationCheckpoint, Memory, Offload, Parallelism};
pub use mistake::{ConfigError, KeyPosition, Mistake};
pub use sections::{
    Checkpoint, Comm, Data, Experts, Generate, Launch, LrScheduler, Metrics, Model, Optimizer,
    OptimizerGroup, Run, Training,
};

pub use value::{ByteLimit, Interval};

pub(crate) use file_values::file_values;
pub(crate) use sections::FP8_AMAX_HISTORY_LEN_MAX;

use checks::changed_keys;
use group_origins::GroupOrigins;
use memory::may_spill;
use mistake::nearest;
use section::Attribute;
use sections::Sections;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use trireme_base::{ContextRank, Rank};
use trireme_parallel::Degrees;
use trireme_tensor::{ModelRank, Precision};

/// The validated and resolved configuration of a run. Its values are consistent with each other.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    task_kind: TaskKind,
    sections: Sections,
    world_size: usize,
    group_origins: GroupOrigins,
}

/// The kind of task that a config is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaskKind {
    /// A language model and its text, in `[model]` and `[data]`.
    LanguageModel,
    /// A [`Task`](crate::Task) that the program defines itself. Keys of language models are refused.
    CustomTask,
}

/// The location of the model's description.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ModelSource<'a> {
    /// In a Hugging Face `config.json` at this path.
    File(&'a Path),
    /// In the section `[model]` itself.
    Inline(Architecture),
    /// In the `config.json` of the directory that also contains the initial weights.
    InitFrom(&'a Path),
}

impl Config {
    /// Returns the default of every key that has one, by its name as `section.key`.
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

    /// Returns whether the key `name`, as `section.key`, affects training.
    pub(crate) fn affects_training(name: &str) -> bool {
        !sections::has_attribute(name, Attribute::NoEffectOnTraining)
    }

    /// Returns whether ranks may have different values of the key `name`, as `section.key`.
    pub(crate) fn may_differ(name: &str) -> bool {
        sections::has_attribute(name, Attribute::PerRank)
    }

    /// Resolves `context_parallel_heads_degree` if it is 0. Chooses the degree with which workers of the context axis send the fewest
    /// bytes, for a model with `num_heads` query heads and `num_kv_heads` key-value heads.
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

    /// Returns the config with the corpus in `folder`.
    pub fn with_data_folder(mut self, folder: PathBuf) -> Self {
        self.sections.data.folder = folder;
        self
    }

    /// Returns the number of workers.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Returns the number of workers that see different samples.
    pub fn data_parallel_degree(&self) -> usize {
        let Parallelism { context_parallel_degree, tensor_parallel_degree, .. } = *self.parallelism();
        self.workers_per_pipeline_rank() / (context_parallel_degree * tensor_parallel_degree)
    }

    /// Returns the number of workers that have the same pipeline rank.
    pub fn workers_per_pipeline_rank(&self) -> usize {
        self.world_size / self.parallelism().pipeline_parallel_degree
    }

    /// Returns the degrees of the mesh axes.
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

    /// Returns the place of a worker on the context axis.
    pub fn context_rank(&self, rank: Rank) -> ContextRank {
        self.degrees().context_rank(rank)
    }

    /// Returns the place of a worker on the tensor and expert axes.
    pub fn model_rank(&self, rank: Rank) -> ModelRank {
        self.degrees().model_rank(rank)
    }

    /// Returns the number of optimizer steps in one step program: 1, unless the pipeline does not drain between steps.
    pub fn steps_per_program(&self) -> usize {
        if self.parallelism().is_asynchronous() {
            self.parallelism().pipeline_parallel_drain_interval as usize
        } else {
            1
        }
    }

    /// Returns whether activations may be spilled to files if loads of experts are uneven.
    pub fn may_spill(&self) -> bool {
        may_spill(self.parallelism(), self.experts(), self.memory())
    }

    /// Returns the number of workers that shard one replica of the training state, including those of the context axis; 1 if nothing is
    /// sharded.
    pub fn num_shards(&self) -> usize {
        let Parallelism { data_parallel_shard_degree, context_parallel_degree, .. } = *self.parallelism();
        let shards = data_parallel_shard_degree as usize;
        if self.parallelism().state_layout().has_shards() { shards * context_parallel_degree } else { shards }
    }

    /// Returns the number of microbatches that each worker computes in one step (gradient accumulation).
    pub fn num_microbatches(&self) -> usize {
        let training = self.training();
        training.global_batch_size / (training.local_batch_size * self.data_parallel_degree())
    }

    /// Returns the number of steps for the configured number of epochs over `num_samples` samples, or `None` if the config gives the steps
    /// instead. The number is rounded up, also to a step after which an asynchronous pipeline is drained.
    pub fn steps_of_epochs(&self, num_samples: u64) -> Option<u64> {
        let (training, parallelism) = (self.training(), self.parallelism());
        let multiple =
            if parallelism.is_asynchronous() { parallelism.pipeline_parallel_drain_interval } else { 1 };
        let steps = training.epochs * num_samples as f64 / training.global_batch_size as f64;
        let steps = steps.ceil() as u64;
        // No run reaches a number of steps that is too large to be rounded up.
        (training.epochs > 0.0).then(|| steps.checked_next_multiple_of(multiple).unwrap_or(steps))
    }

    /// Returns the keys of `[data]` that are set and have no effect because the tokens in `folder` were prepared earlier. These keys are no
    /// mistake: the same config may be used before and after its text is prepared.
    pub(crate) fn data_keys_without_effect(&self) -> Vec<&'static str> {
        let data = self.data();
        let is_used = |key: &&str| matches!(*key, "folder" | "packing" | "mask_documents");
        if data.inputs.is_empty() {
            changed_keys(data).filter(|key| !is_used(key)).collect()
        } else {
            Vec::new()
        }
    }

    /// Returns the run's folder.
    pub fn run_folder(&self) -> PathBuf {
        self.run().folder.join(&self.run().name)
    }

    /// Returns whether a checkpoint is saved at each new lowest validation loss.
    pub(crate) fn keeps_best(&self) -> bool {
        self.checkpoint().enable && self.checkpoint().keep_best && self.training().validation_interval > 0
    }

    /// Returns the kind of task that the config is for.
    pub fn task_kind(&self) -> TaskKind {
        self.task_kind
    }

    /// Returns the location of the language model's description.
    ///
    /// # Panics
    /// If the config is not for a language model.
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

/// Returns the bytes that a worker sends in a block's forward and backward, per position that it has and per element of a head. `width` is
/// the size of an activation in bytes. See docs/context.md.
fn bytes_sent([heads, kv_heads]: [usize; 2], degree: usize, heads_degree: usize, width: f64) -> f64 {
    let (ring, sharing) = ((degree / heads_degree) as f64, heads_degree as f64);
    let [heads, keys_values] = [heads as f64, 2.0 * kv_heads as f64];
    // The exchange of queries, keys, values and outputs, and of their gradients.
    let exchanged = 2.0 * (sharing - 1.0) / sharing * (2.0 * heads + keys_values) * width;
    let grads = if ring > 1.0 { ring * 4.0 } else { 0.0 };
    exchanged + keys_values * (2.0 * (ring - 1.0) * width + grads)
}
