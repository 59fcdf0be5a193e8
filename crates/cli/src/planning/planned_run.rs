//! A run to plan: its config, its model, and its workers.

use crate::host::{HostShare, SharedLimit};
use crate::numbers::with_noun;
use std::fmt;
use std::path::Path;
use trireme_base::{ContextRank, Rank};
use trireme_comm::{CommError, Group, GroupOptions, TransportChoice, TransportKind};
use trireme_data::Corpus;
use trireme_model::{Model, ModelConfig, ModelError, TensorSpec};
use trireme_parallel::{Determinism, ValidationBatches};
use trireme_schedule::collective::Hosts;
use trireme_tensor::{Device, ModelRank, SimdLevel};
use trireme_train::config::{Config, ConfigError, TaskKind};
use trireme_train::{
    SequenceFormat, Task, TrainError, local_threads, model_config, positions_of_batch, share_of_cores,
    validation_batches,
};

/// The path and overrides of a config, from which it can be loaded again with changes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ConfigSource<'a> {
    pub(crate) path: &'a Path,
    pub(crate) overrides: &'a [String],
    /// Number of workers, if another launcher has started them.
    pub(crate) world_size: Option<usize>,
    pub(crate) task_kind: TaskKind,
}

impl ConfigSource<'_> {
    pub(crate) fn original_toml(&self, config: &Config) -> Result<String, ConfigError> {
        config.original_toml(self.path, self.overrides)
    }

    /// Reads the config with further overrides.
    pub(crate) fn load(&self, changes: &[String]) -> Result<Config, ConfigError> {
        let overrides = [self.overrides, changes].concat();
        let config = Config::load_for_task(self.task_kind, self.path, &overrides, self.world_size)?;
        if config.parallelism().context_parallel_degree == 1 || self.task_kind == TaskKind::CustomTask {
            return Ok(config);
        }
        // A model that cannot be read is reported where it is needed.
        let heads = model_config(&config, 0).map(|(model, _)| (model.num_heads, model.num_kv_heads));
        Ok(match heads {
            Ok((num_heads, num_kv_heads)) => config.with_heads_chosen(num_heads, num_kv_heads),
            Err(_) => config,
        })
    }
}

#[derive(Clone, Copy)]
pub(crate) struct PlannedRun<'a> {
    pub(crate) config: &'a Config,
    pub(crate) source: ConfigSource<'a>,
    pub(crate) workload: Workload<'a>,
    pub(crate) workers: Workers<'a>,
}

/// How the model of a run is built, and the tensors of its batches.
#[derive(Clone, Copy)]
pub(crate) enum Workload<'a> {
    /// A language model. Its text need not exist yet.
    Language { model: &'a ModelConfig, sequences: SequenceFormat },
    /// A task, and the tensors of one sample.
    Task { task: &'a dyn Task, sample: &'a [TensorSpec] },
}

impl Workload<'_> {
    pub(super) fn build(&self, device: &Device, place: ModelRank) -> Result<Model, ModelError> {
        Model::build_at(place, device, |device, table| match self {
            Workload::Language { model, sequences } => model.build_into(table, sequences.seq_len, device),
            Workload::Task { task, .. } => task.build(device, table),
        })
    }

    /// Returns the tensors of a worker's part of a microbatch.
    pub(super) fn batch(&self, config: &Config, context: ContextRank) -> Result<Vec<TensorSpec>, TrainError> {
        let num_samples = config.training().local_batch_size;
        let (sample, has_positions): (Vec<TensorSpec>, bool) = match self {
            Workload::Language { sequences, .. } => (sequences.sample(), true),
            Workload::Task { task, sample } => (sample.to_vec(), task.has_positions()),
        };
        let whole: Vec<TensorSpec> = sample.iter().map(|spec| spec.in_batch(num_samples)).collect();
        positions_of_batch(&whole, context, has_positions)
    }

    /// Returns the batches of a validation, if the run has one. For text that is not prepared yet, as many samples as the config asks for
    /// are assumed.
    pub(super) fn validation(&self, config: &Config) -> Result<Option<ValidationBatches>, TrainError> {
        let (data, training) = (config.data(), config.training());
        let num_samples = match self {
            Workload::Task { task, .. } => task.validation_data()?.map(|samples| samples.num_samples()),
            Workload::Language { sequences, .. } => match Corpus::open(&data.folder) {
                // Too few tokens are refused elsewhere.
                Ok(corpus) => corpus
                    .validation
                    .and_then(|validation| sequences.num_validation_samples(&validation.tokens).ok()),
                Err(_) => (data.validation_fraction > 0.0 || !data.validation_inputs.is_empty())
                    .then_some(training.validation_samples.max(1) as u64),
            },
        };
        let num_samples = num_samples.filter(|&num_samples| num_samples > 0);
        Ok(num_samples.map(|num_samples| validation_batches(num_samples, training)))
    }
}

/// The workers of a run, as one of them sees them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Workers<'a> {
    pub(super) rank: usize,
    pub(super) world_size: usize,
    pub(super) local_world_size: usize,
    pub(super) num_threads: usize,
    /// The SIMD level of the workers' kernels, on which scratch memory depends.
    pub(super) simd_level: SimdLevel,
    pub(super) shares_memory: bool,
    /// Number of workers that share memory segments with this one, itself included.
    pub(super) num_sharing_memory: usize,
    /// Memory limits of the workers together.
    pub(super) limits: &'a [SharedLimit],
}

impl<'a> Workers<'a> {
    /// Returns the workers that the command starts on this host, as the first one sees them.
    pub(crate) fn local(config: &Config, limits: &'a [SharedLimit], simd_level: SimdLevel) -> Self {
        let world_size = config.world_size();
        let shares_memory = matches!(config.comm().transport, TransportChoice::Auto | TransportChoice::Shm);
        Workers {
            rank: 0,
            world_size,
            local_world_size: world_size,
            num_threads: local_threads(config, share_of_cores(world_size)),
            simd_level,
            shares_memory,
            num_sharing_memory: if shares_memory { world_size } else { 1 },
            limits,
        }
    }

    /// Returns the same workers on several hosts with `local_world_size` workers each, as the first one sees them.
    pub(crate) fn on_hosts(self, config: &Config, local_world_size: usize) -> Self {
        let shares_memory = self.shares_memory && local_world_size == self.world_size;
        let num_sharing = self.num_sharing_memory.min(local_world_size);
        let num_threads = local_threads(config, share_of_cores(local_world_size));
        Workers { local_world_size, num_threads, shares_memory, num_sharing_memory: num_sharing, ..self }
    }

    pub(crate) fn of(config: &Config, group: &Group, share: &'a HostShare, simd_level: SimdLevel) -> Self {
        let local_world_size = share.num_workers;
        let num_sharing = match group.transport() {
            TransportKind::Shm | TransportKind::ShmAndTcp => local_world_size,
            _ => 1,
        };
        Workers {
            rank: group.rank().0,
            world_size: group.world_size(),
            local_world_size,
            num_threads: local_threads(config, share.num_threads),
            simd_level,
            shares_memory: group.transport() == TransportKind::Shm,
            num_sharing_memory: num_sharing,
            limits: &share.limits,
        }
    }

    /// Returns this worker's group in a dry world, in which no other rank runs. Neighboring ranks share a host, as launchers number them.
    pub(super) fn dry_group(&self, config: &Config) -> Result<Group, CommError> {
        let hosts: Vec<usize> = (0..self.world_size).map(|rank| rank / self.local_world_size).collect();
        let transport = match (self.num_sharing_memory > 1, self.shares_memory) {
            (true, true) => TransportKind::Shm,
            (true, false) => TransportKind::ShmAndTcp,
            (false, _) => TransportKind::Tcp,
        };
        let keeps_order = config.training().determinism == Determinism::Layout;
        let options = GroupOptions { keeps_order, ..GroupOptions::default() };
        Group::dry(Rank(self.rank), Hosts::new(&hosts), transport, &options)
    }

    /// Returns a worker for each pipeline rank, on this host if possible, and the number of workers of this host that have that pipeline
    /// rank. Neighboring ranks share a host, as launchers number them.
    pub(super) fn by_pipeline_rank(self, config: &Config) -> Vec<(Workers<'a>, usize)> {
        let workers_per_pipeline_rank = config.workers_per_pipeline_rank();
        let first = self.rank / self.local_world_size * self.local_world_size;
        let worker = |place: usize| {
            let ranks = place * workers_per_pipeline_rank..(place + 1) * workers_per_pipeline_rank;
            let on_host = ranks.start.max(first)..ranks.end.min(first + self.local_world_size);
            let rank = if on_host.is_empty() { ranks.start } else { on_host.start };
            (Workers { rank, ..self }, on_host.len())
        };
        (0..config.parallelism().pipeline_parallel_degree).map(worker).collect()
    }
}

impl fmt::Display for Workers<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {} threads", with_noun(self.world_size, "worker"), self.num_threads)
    }
}
