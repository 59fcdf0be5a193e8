//! What a run takes before it runs: `train` says what it would do, the planner says how much that takes.

mod alternatives;
mod choices;
mod drawing;
mod setup;

#[cfg(test)]
mod tests;

pub(crate) use alternatives::{Source, advice, changes};
pub(crate) use choices::open_classes;
pub(crate) use drawing::Drawing;

use anyhow::Result;
use choices::Planning;
use setup::{Layout, memory_setup, passes};
use std::fmt;
use trireme_base::{Bytes, Category, UnitPasses};
use trireme_comm::{Group, TransportKind};
use trireme_data::{Corpus, Tokenizer};
use trireme_model::Model;
use trireme_planner::{CategoryBytes, MemoryBounds, MemorySetup, Prediction, predict};
use trireme_schedule::Program;
use trireme_tensor::Device;
use trireme_train::config::{self, ActivationCheckpointMode, Config, ModelSource, Transport};
use trireme_train::metrics::MemoryPeakBytes;
use trireme_train::{
    MemoryPlan, StepChoices, TrainError, device_options, executor_options, local_threads, model_config,
    optimizer_options, proven_programs, step_programs,
};

/// The workers of a run, as one of them sees them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Workers {
    rank: usize,
    world_size: usize,
    /// On this host.
    local_world_size: usize,
    num_threads: usize,
    shares_memory: bool,
    /// Whose memory the group of this one takes a part of.
    num_sharing: usize,
}

impl Workers {
    /// Those that the command starts on this host, seen by the first.
    pub(crate) fn local(config: &Config) -> Self {
        let world_size = config.world_size();
        let shares_memory = matches!(config.comm().transport, Transport::Auto | Transport::Shm);
        Workers {
            rank: 0,
            world_size,
            local_world_size: world_size,
            num_threads: local_threads(config, world_size),
            shares_memory,
            num_sharing: if shares_memory { world_size } else { 1 },
        }
    }

    /// Those of a group.
    pub(crate) fn of(config: &Config, group: &Group, local_world_size: usize) -> Self {
        let num_sharing = match group.transport() {
            TransportKind::Shm | TransportKind::ShmAndTcp => local_world_size,
            _ => 1,
        };
        Workers {
            rank: group.rank().0,
            world_size: group.world_size(),
            local_world_size,
            num_threads: local_threads(config, local_world_size),
            shares_memory: group.transport() == TransportKind::Shm,
            num_sharing,
        }
    }
}

impl fmt::Display for Workers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let workers = if self.world_size == 1 { "worker" } else { "workers" };
        write!(f, "{} {workers} x {} threads", self.world_size, self.num_threads)
    }
}

/// A step of a run, and what it takes of one worker's memory.
pub(crate) struct Plan {
    /// The worker.
    pub(crate) rank: usize,
    pub(crate) model: Model,
    /// What the passes of each unit take.
    pub(crate) passes: Vec<UnitPasses>,
    pub(crate) program: Program,
    pub(crate) choices: StepChoices,
    pub(crate) prediction: Prediction,
    /// What it has to stay within, if anything.
    pub(crate) bound: Option<usize>,
    /// The same of the host's memory for state that is not on the device.
    pub(crate) host_bound: usize,
    /// What was chosen and why, where something was to be chosen.
    pub(crate) reasons: Vec<String>,
}

impl Plan {
    /// Plans a run over a corpus of `vocabulary_size`. `chosen` is what another worker has chosen.
    pub(crate) fn new(
        config: &Config,
        vocabulary_size: usize,
        workers: Workers,
        chosen: Option<StepChoices>,
    ) -> Result<Self> {
        let device = Device::counting(device_options_without_budget(config, workers))?;
        let (model, _) = model_config(config, vocabulary_size)?;
        let model = Model::new(model, &device).map_err(TrainError::from)?;
        let (optimizer, options) = (optimizer_options(config, model.table())?, executor_options(config));
        let (num_shards, data_degree) = (config.num_shards(), config.data_parallel_degree());
        let layout = Layout {
            num_shards,
            num_replicas: data_degree / num_shards,
            shard: workers.rank % num_shards,
            num_local: num_local(num_shards, workers.local_world_size),
            pipeline_degree: config.parallelism().pipeline_parallel_degree,
            shares_memory: workers.shares_memory && workers.world_size > 1,
            num_sharing: workers.num_sharing,
        };
        let (passes, _) = passes(&model, &device, &options)?;
        let is_open = chosen.is_none();
        let given = chosen.map_or_else(|| StepChoices::given(config, &passes), Ok)?;
        let rank = workers.rank / data_degree;
        // What another worker has chosen it has proven.
        let make = if is_open { proven_programs } else { step_programs };
        let outline = make(config, &model, &given)?.swap_remove(rank).outline;
        let setup = memory_setup(&model, &device, &options, &optimizer, given.places, (layout, &outline))?;
        let bound = bound(config, workers);
        let host_bound = |device: usize| host_bound(config, workers, device);
        let bounds =
            MemoryBounds { device: bound.unwrap_or(usize::MAX), host: host_bound(bound.unwrap_or(0)) };
        let planning = Planning { config, model: &model, setup: &setup, bounds, rank };
        let (choices, reasons) = if is_open { planning.choose(given) } else { (given, Vec::new()) };
        let program = step_programs(config, &model, &choices)?.swap_remove(rank);
        let prediction = predict(&MemorySetup { places: choices.places, ..setup }, &program);
        let (rank, host_bound) = (workers.rank, host_bound(prediction.total()));
        Ok(Plan { rank, model, passes, program, choices, prediction, bound, host_bound, reasons })
    }

    /// The plan of the worker that takes most, of one in each place of the pipeline; the first one chooses for all.
    pub(crate) fn largest(config: &Config, vocabulary_size: usize, workers: Workers) -> Result<Self> {
        let mut largest = Plan::new(config, vocabulary_size, workers, None)?;
        for place in 1..config.parallelism().pipeline_parallel_degree {
            let workers = Workers { rank: place * config.data_parallel_degree(), ..workers };
            let plan = Plan::new(config, vocabulary_size, workers, Some(largest.choices.clone()))?;
            let need = |plan: &Plan| (plan.host_excess() > 0, plan.prediction.total());
            if need(&plan) > need(&largest) {
                largest = Plan { reasons: largest.reasons, ..plan };
            }
        }
        Ok(largest)
    }

    /// Bytes by which it passes what it has to stay within; 0 if it fits.
    pub(crate) fn excess(&self) -> usize {
        self.bound.map_or(0, |bound| self.prediction.total().saturating_sub(bound))
    }

    /// Whether it stays within what it may take.
    pub(crate) fn fits(&self) -> bool {
        self.excess() == 0 && self.host_excess() == 0
    }

    /// The same of the host's memory.
    pub(crate) fn host_excess(&self) -> usize {
        self.prediction.host.saturating_sub(self.host_bound)
    }

    /// What the trainer is told of it.
    pub(crate) fn memory_plan(&self) -> MemoryPlan {
        let Prediction { peaks, .. } = self.prediction;
        let peak = |category| peaks.get(category) as u64;
        let total = self.prediction.total();
        let moment = self.prediction.moment(&self.program);
        let predicted = format!("{} are predicted at most, {moment}", Bytes(total as u64));
        MemoryPlan {
            choices: self.choices.clone(),
            predicted: MemoryPeakBytes {
                parameters: peak(Category::Parameters),
                gradients: peak(Category::Gradients),
                optimizer: peak(Category::Optimizer),
                activations: peak(Category::Activations),
                communication: peak(Category::Communication),
                total: total as u64,
            },
            comment: self.reasons.iter().cloned().chain([predicted]).collect::<Vec<_>>().join("\n"),
        }
    }
}

/// Workers of a replica on each of its hosts: neighbours share a host, as launchers number them.
fn num_local(num_shards: usize, local_world_size: usize) -> usize {
    // The greatest common divisor.
    let (mut large, mut small) = (num_shards, local_world_size);
    while small > 0 {
        (large, small) = (small, large % small);
    }
    large
}

/// The prediction itself knows no budget.
fn device_options_without_budget(config: &Config, workers: Workers) -> trireme_tensor::DeviceOptions {
    trireme_tensor::DeviceOptions { budget: None, ..device_options(config, workers.num_threads) }
}

/// Bytes that a worker has to stay within.
fn bound(config: &Config, workers: Workers) -> Option<usize> {
    let bytes = |limit: config::ByteLimit| limit.0.map(|bytes| bytes.0 as usize);
    let budget = bytes(config.memory().device_budget);
    let checkpoint = config.activation_checkpoint();
    match (checkpoint.mode, bytes(checkpoint.memory)) {
        (ActivationCheckpointMode::Auto, Some(memory)) => {
            Some(budget.map_or(memory, |budget| budget.min(memory)))
        }
        (ActivationCheckpointMode::Auto, None) => budget.or(Some(host_bytes() / workers.local_world_size)),
        _ => budget,
    }
}

fn host_bytes() -> usize {
    let system = rustix::system::sysinfo();
    system.totalram as usize * system.mem_unit.max(1) as usize
}

/// What the state that is not on the device may take of the host's memory, for one worker whose device takes `device` bytes of it.
fn host_bound(config: &Config, workers: Workers, device: usize) -> usize {
    let bytes = |limit: config::ByteLimit| limit.0.map(|bytes| bytes.0 as usize);
    let share = host_bytes() / workers.local_world_size;
    bytes(config.memory().host_budget).unwrap_or(share.saturating_sub(device))
}

/// The vocabulary of the config's corpus, or what it will be when it is prepared.
pub(crate) fn vocabulary_size(config: &Config) -> Result<usize> {
    let data = config.data();
    if let Ok(corpus) = Corpus::open(&data.folder) {
        return Ok(corpus.train.vocabulary_size());
    }
    let is_known = match config.model_source() {
        ModelSource::Inline(_) => config.model().vocab_size > 0,
        ModelSource::File(_) | ModelSource::InitFrom(_) => true,
    };
    Ok(match (&data.tokenizer, data.train_bpe) {
        // The model's own counts, and it is not smaller.
        _ if is_known => 0,
        (config::Tokenizer::Bytes, 0) => Tokenizer::bytes().vocabulary_size(),
        (config::Tokenizer::Bytes, vocabulary_size) => vocabulary_size,
        (config::Tokenizer::File(_), _) => {
            anyhow::bail!(
                "the vocabulary is not known before the text is prepared: run `trireme prepare` first, or set [model] vocab_size"
            )
        }
    })
}

/// What a device has held at most, by category and together.
pub(crate) fn measured(device: &Device) -> (CategoryBytes, usize) {
    let peaks = Category::ALL.map(|category| device.memory().usage(category).peak);
    (CategoryBytes::new(peaks), device.memory().total().peak)
}
