//! What a run takes before it runs: `train` says what it would do, the planner says how much that takes.

mod alternatives;
mod choices;
mod drawing;
mod exerciser;
mod host_bytes;
mod limits;
mod probe;
mod report;
mod sizes;

#[cfg(test)]
mod tests;

pub(crate) use alternatives::changes;
pub(crate) use choices::open_classes;
pub(crate) use drawing::Drawing;
use host_bytes::HostBytes;
pub(crate) use limits::Limit;
pub(crate) use report::PlanReport;

use crate::launch::HostShare;
use crate::memory_limit::SharedLimit;
use alternatives::advice;
use anyhow::Result;
use choices::Planning;
use probe::Probed;
use sizes::{batch_memory, state_sizes};
use std::fmt;
use std::path::Path;
use trireme_base::{Bytes, Category, ContextPlace, Rank, StepEntries, UnitPasses};
use trireme_comm::{CommError, Group, TransportChoice, TransportKind};
use trireme_data::{Corpus, PrepareReport, Tokenizer};
use trireme_model::{Model, ModelConfig, ModelError, Rehearsal, TensorSpec};
use trireme_parallel::{Executor, Placements, ValidationBatches, chain};
use trireme_planner::{CategoryBytes, DryRun, MemoryBounds, Prediction, StepTime, step_time};
use trireme_schedule::Program;
use trireme_schedule::collective::Hosts;
use trireme_tensor::{CpuFeatures, Device, DeviceOptions, ModelPlace, RecordedCalls};
use trireme_train::config::{self, Config, ConfigError, ModelSource, Subject};
use trireme_train::metrics::MemoryPeakBytes;
use trireme_train::{
    Sequences, StepChoices, Task, TrainError, WorkerPlan, base_programs, device_options, executor_options,
    local_threads, lowered, model_config, new_executor, optimizer_options, positions_of_batch,
    proven_programs, share_of_cores, step_programs, validation_batches,
};

/// Where a config came from, so that it can be read again with changes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Source<'a> {
    pub(crate) path: &'a Path,
    pub(crate) overrides: &'a [String],
    /// Number of workers, if another launcher has started them.
    pub(crate) world_size: Option<usize>,
    pub(crate) subject: Subject,
}

impl Source<'_> {
    /// The file with the overrides in it.
    pub(crate) fn given(&self, config: &Config) -> Result<String, ConfigError> {
        config.given(self.path, self.overrides)
    }

    /// Reads the config with further overrides.
    pub(crate) fn load(&self, changes: &[String]) -> Result<Config, ConfigError> {
        let overrides = [self.overrides, changes].concat();
        let config = Config::load_as(self.subject, self.path, &overrides, self.world_size)?;
        if config.parallelism().context_parallel_degree == 1 || self.subject == Subject::OwnTask {
            return Ok(config);
        }
        // A model that cannot be read is refused where it is needed.
        let heads = model_config(&config, 0).map(|(model, _)| (model.num_heads, model.num_kv_heads));
        Ok(match heads {
            Ok((num_heads, num_kv_heads)) => config.with_heads_chosen(num_heads, num_kv_heads),
            Err(_) => config,
        })
    }
}

/// A run to plan.
#[derive(Clone, Copy)]
pub(crate) struct Job<'a> {
    pub(crate) config: &'a Config,
    pub(crate) source: Source<'a>,
    pub(crate) blueprint: Blueprint<'a>,
    pub(crate) workers: Workers<'a>,
}

/// How the model of a run is built, and what its batches are.
#[derive(Clone, Copy)]
pub(crate) enum Blueprint<'a> {
    /// A language model, whose text need not be there yet.
    Language { model: &'a ModelConfig, sequences: Sequences },
    /// A task, and the tensors of one sample.
    Task { task: &'a dyn Task, sample: &'a [TensorSpec] },
}

impl Blueprint<'_> {
    fn build(&self, device: &Device, place: ModelPlace) -> Result<Model, ModelError> {
        Model::build_at(place, device, |device, table| match self {
            Blueprint::Language { model, sequences } => model.build_into(table, sequences.seq_len, device),
            Blueprint::Task { task, .. } => task.build(device, table),
        })
    }

    /// What a worker has of a microbatch.
    fn batch(&self, config: &Config, context: ContextPlace) -> Result<Vec<TensorSpec>, TrainError> {
        let num_samples = config.training().local_batch_size;
        let whole: Vec<TensorSpec> = match self {
            Blueprint::Language { sequences, .. } => {
                sequences.sample().into_iter().map(|spec| spec.in_batch(num_samples)).collect()
            }
            Blueprint::Task { sample, .. } => sample.iter().map(|spec| spec.in_batch(num_samples)).collect(),
        };
        let has_positions = match self {
            Blueprint::Language { .. } => true,
            Blueprint::Task { task, .. } => task.has_positions(),
        };
        positions_of_batch(&whole, context, has_positions)
    }

    /// The batches of a validation, if the run has any. For text that is not there yet, as many samples as the config asks for are assumed.
    fn validation(&self, config: &Config) -> Result<Option<ValidationBatches>, TrainError> {
        let (data, training) = (config.data(), config.training());
        let num_samples = match self {
            Blueprint::Task { task, .. } => task.validation_data()?.map(|samples| samples.num_samples()),
            Blueprint::Language { sequences, .. } => match Corpus::open(&data.folder) {
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
    rank: usize,
    world_size: usize,
    /// On this host.
    local_world_size: usize,
    num_threads: usize,
    /// The SIMD level of their kernels, on which scratch memory depends.
    features: CpuFeatures,
    shares_memory: bool,
    /// Whose memory the group of this one takes a part of.
    num_sharing: usize,
    /// What workers may take together.
    limits: &'a [SharedLimit],
}

impl<'a> Workers<'a> {
    /// Those that the command starts on this host, seen by the first.
    pub(crate) fn local(config: &Config, limits: &'a [SharedLimit], features: CpuFeatures) -> Self {
        let world_size = config.world_size();
        let shares_memory = matches!(config.comm().transport, TransportChoice::Auto | TransportChoice::Shm);
        Workers {
            rank: 0,
            world_size,
            local_world_size: world_size,
            num_threads: local_threads(config, share_of_cores(world_size)),
            features,
            shares_memory,
            num_sharing: if shares_memory { world_size } else { 1 },
            limits,
        }
    }

    /// The same workers on several hosts with `local_world_size` of them each, seen by the first.
    pub(crate) fn on_hosts(self, config: &Config, local_world_size: usize) -> Self {
        let shares_memory = self.shares_memory && local_world_size == self.world_size;
        let num_sharing = self.num_sharing.min(local_world_size);
        let num_threads = local_threads(config, share_of_cores(local_world_size));
        Workers { local_world_size, num_threads, shares_memory, num_sharing, ..self }
    }

    /// Those of a group.
    pub(crate) fn of(config: &Config, group: &Group, share: &'a HostShare, features: CpuFeatures) -> Self {
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
            features,
            shares_memory: group.transport() == TransportKind::Shm,
            num_sharing,
            limits: &share.limits,
        }
    }

    /// This worker's end of a world that is not there. Neighbours share a host, as launchers number them.
    fn dry_group(&self) -> Result<Group, CommError> {
        let hosts: Vec<usize> = (0..self.world_size).map(|rank| rank / self.local_world_size).collect();
        let transport = match (self.num_sharing > 1, self.shares_memory) {
            (true, true) => TransportKind::Shm,
            (true, false) => TransportKind::ShmAndTcp,
            (false, _) => TransportKind::Tcp,
        };
        Group::dry(Rank(self.rank), Hosts::new(&hosts), transport)
    }

    /// For each place of the pipeline a worker, one of this host if there is any, and how many of them this host has there.
    /// Neighbours share a host, as launchers number them.
    fn by_place(self, config: &Config) -> Vec<(Workers<'a>, usize)> {
        let num_of_place = config.workers_per_place();
        let first = self.rank / self.local_world_size * self.local_world_size;
        let worker = |place: usize| {
            let ranks = place * num_of_place..(place + 1) * num_of_place;
            let near = ranks.start.max(first)..ranks.end.min(first + self.local_world_size);
            let rank = if near.is_empty() { ranks.start } else { near.start };
            (Workers { rank, ..self }, near.len())
        };
        (0..config.parallelism().pipeline_parallel_degree).map(worker).collect()
    }
}

impl fmt::Display for Workers<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let workers = if self.world_size == 1 { "worker" } else { "workers" };
        write!(f, "{} {workers} x {} threads", self.world_size, self.num_threads)
    }
}

/// How long a step takes.
pub(crate) struct PredictedTime {
    pub(crate) time: StepTime,
    /// Kernels and operations that were not measured, and count as if they took no time.
    pub(crate) unmeasured: Vec<&'static str>,
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
    /// What the config bounds of it, and the worker's share of the host's limit.
    bounds: MemoryBounds,
    /// What all workers of this host are predicted to take together.
    on_host: HostBytes,
    /// What was chosen and why, where something was to be chosen.
    pub(crate) reasons: Vec<String>,
}

impl Plan {
    /// The plan of one worker. `chosen` is what another worker has chosen.
    pub(crate) fn new(job: Job<'_>, chosen: Option<StepChoices>) -> Result<Self> {
        let Job { config, workers, .. } = job;
        let mut plan = Plan::of_worker(job, chosen)?;
        let place = |workers: Workers<'_>| workers.rank / config.workers_per_place();
        let mut on_host = HostBytes::of_launcher(workers);
        for (worker, num_workers) in
            workers.by_place(config).into_iter().filter(|(_, num_workers)| *num_workers > 0)
        {
            if place(worker) == place(workers) {
                on_host.add(&plan, config, num_workers);
            } else {
                let chosen = Some(plan.choices.clone());
                on_host.add(&Plan::of_worker(Job { workers: worker, ..job }, chosen)?, config, num_workers);
            }
        }
        plan.on_host = on_host;
        Ok(plan)
    }

    /// The plan of the worker that needs the most memory, of one in each place of the pipeline; the first one chooses for all.
    pub(crate) fn largest(job: Job<'_>) -> Result<Self> {
        let Job { config, workers, .. } = job;
        let need = |plan: &Plan| (plan.prediction.host > plan.bounds.host, plan.prediction.total());
        let mut places = workers.by_place(config).into_iter();
        let (worker, num_workers) = places.next().expect("a pipeline has a place");
        let mut largest = Plan::of_worker(Job { workers: worker, ..job }, None)?;
        let mut on_host = HostBytes::of_launcher(workers);
        on_host.add(&largest, config, num_workers);
        for (worker, num_workers) in places {
            let plan = Plan::of_worker(Job { workers: worker, ..job }, Some(largest.choices.clone()))?;
            on_host.add(&plan, config, num_workers);
            if need(&plan) > need(&largest) {
                largest = Plan { reasons: largest.reasons, ..plan };
            }
        }
        Ok(Plan { on_host, ..largest })
    }

    /// As [`new`](Plan::new), without what the other workers of the host take.
    fn of_worker(job: Job<'_>, chosen: Option<StepChoices>) -> Result<Self> {
        let Job { config, workers, .. } = job;
        let (model, rehearsal) = rehearsed(job)?;
        let device = Device::counting(device_options_without_budget(config, workers))?;
        let (optimizer, options) = (optimizer_options(config, model.table())?, executor_options(config));
        let num_shards = config.num_shards();
        let (passes, chain) = (rehearsal.passes(), chain(model.table(), &rehearsal, options.determinism));
        let is_open = chosen.is_none();
        let given = chosen.map_or_else(|| StepChoices::given(config, &passes), Ok)?;
        if is_open {
            // What another worker has chosen it has proven.
            proven_programs(config, &chain, &given)?;
        }
        let base = base_programs(config, &chain, &given)?;
        let program = |place: usize, choices: &StepChoices| lowered(base[place].clone(), choices);
        let places = workers.by_place(config);
        let mesh = config.degrees().state_mesh(workers.world_size);
        let sizes = |place: usize| {
            let outline = &program(place, &given).outline;
            let placements = Placements::new(model.table(), outline, mesh.clone());
            let parts = placements.parts(model.table(), Rank(places[place].0.rank));
            state_sizes(
                (model.table(), &rehearsal),
                (&options, &optimizer),
                (&parts, num_shards),
                outline,
                &device,
            )
        };
        let bounds = limits::bounds(config, workers);
        let validation = job.blueprint.validation(config)?;
        let run = |place: usize, choices: &StepChoices| {
            let job = Job { workers: places[place].0, ..job };
            dry_run(job, &rehearsal, program(place, choices), validation)
        };
        let planning = Planning {
            config,
            sizes: &sizes,
            passes: &passes,
            batch: &batch_memory(&rehearsal),
            bounds,
            num_places: places.len(),
            program: &program,
            run: &run,
        };
        let (choices, mut reasons) =
            if is_open { planning.choose(given.clone())? } else { (given.clone(), Vec::new()) };
        reasons.extend(limits::budget_notice(config, workers, bounds));
        let place = workers.rank / config.workers_per_place();
        let DryRun { program, prediction, .. } =
            dry_run(job, &rehearsal, program(place, &choices), validation)?;
        let (rank, on_host) = (workers.rank, HostBytes::of_launcher(workers));
        Ok(Plan { rank, model, passes, program, choices, prediction, bounds, on_host, reasons })
    }

    /// How long a step takes on this machine, whose kernels and links the workers of the job measure for some seconds; `world` is
    /// this one's end of theirs. The first worker gets the prediction, the others `None`. Collective.
    pub(crate) fn step_time(&self, job: Job<'_>, world: Group) -> Result<Option<PredictedTime>> {
        let Job { config, workers, .. } = job;
        let (model, rehearsal) = rehearsed(job)?;
        let chain = chain(model.table(), &rehearsal, executor_options(config).determinism);
        let programs = step_programs(config, &chain, &self.choices)?;
        let calls = RecordedCalls::default();
        let entries = |((worker, _), program): ((Workers<'_>, usize), &Program)| {
            let executor = dry_executor(Job { workers: worker, ..job }, &rehearsal, program.clone())?;
            executor.device().record_calls(&calls);
            Ok(executor.dry_entries().map_err(TrainError::from)?)
        };
        let stages: Vec<StepEntries> =
            workers.by_place(config).into_iter().zip(&programs).map(entries).collect::<Result<_>>()?;
        let (rank, num_of_place) = (world.rank(), config.workers_per_place());
        let outline = &programs[rank.0 / num_of_place].outline;
        let mesh = config.degrees().state_mesh(world.world_size());
        let parts = Placements::new(model.table(), outline, mesh).parts(model.table(), rank);
        let limits = (&parts[..], self.bounds.machine);
        let rates = Probed::measure(job, &stages, (&model, &rehearsal), limits, &calls, world)?;
        let Some(rates) = rates else { return Ok(None) };
        let mut time = step_time(&stages, num_of_place, &rates)?;
        // A program that does not drain has several steps.
        let num_steps = outline.num_steps() as f64;
        time.computing.iter_mut().chain([&mut time.seconds]).for_each(|seconds| *seconds /= num_steps);
        Ok(Some(PredictedTime { time, unmeasured: rates.unmeasured(&stages) }))
    }

    /// The predicted peak of each category of the device's memory, and of their sum.
    fn memory_peak_bytes(&self) -> MemoryPeakBytes {
        let peak = |category| self.prediction.peaks.get(category) as u64;
        MemoryPeakBytes {
            parameters: peak(Category::Parameters),
            gradients: peak(Category::Gradients),
            optimizer: peak(Category::Optimizer),
            activations: peak(Category::Activations),
            communication: peak(Category::Communication),
            total: self.prediction.total() as u64,
        }
    }

    /// What the trainer is told of it.
    pub(crate) fn worker_plan(&self, step_seconds: Option<f64>) -> WorkerPlan {
        let total = self.prediction.total();
        let moment = self.prediction.moment(&self.program);
        let predicted = format!("predicted peak: {} at {moment}", Bytes(total as u64));
        WorkerPlan {
            step_seconds,
            choices: self.choices.clone(),
            predicted: self.memory_peak_bytes(),
            besides_activations: self.prediction.besides_activations,
            comment: self.reasons.iter().cloned().chain([predicted]).collect::<Vec<_>>().join("\n"),
        }
    }
}

/// The model of a job, and what its passes are.
fn rehearsed(job: Job<'_>) -> Result<(Model, Rehearsal)> {
    let Job { config, blueprint, workers, .. } = job;
    let device = Device::counting(device_options_without_budget(config, workers))?;
    let place = config.model_place(Rank(workers.rank));
    let model = blueprint.build(&device, place).map_err(TrainError::from)?;
    let context = config.context_place(Rank(workers.rank));
    let batch = blueprint.batch(config, context)?;
    let rehearsal = model.rehearse(&device, executor_options(config).passes(context), &batch);
    Ok((model, rehearsal.map_err(TrainError::from)?))
}

/// The executor of a job's worker in a world that is not there, on a device that only counts.
fn dry_executor(job: Job<'_>, rehearsal: &Rehearsal, program: Program) -> Result<Executor> {
    let Job { config, blueprint, workers, .. } = job;
    let device = Device::counting(device_options_without_budget(config, workers))?;
    let model = blueprint.build(&device, config.model_place(Rank(workers.rank))).map_err(TrainError::from)?;
    let of_model = (model, rehearsal.clone());
    Ok(new_executor(config, of_model, program, workers.dry_group()?, &device)?)
}

/// Lets the worker of a job go through its program, and a validation, without computing.
fn dry_run(
    job: Job<'_>,
    rehearsal: &Rehearsal,
    program: Program,
    validation: Option<ValidationBatches>,
) -> Result<DryRun> {
    let executor = dry_executor(job, rehearsal, program.clone())?;
    let found = executor.dry_run(validation).map_err(TrainError::from)?;
    let lines: Vec<CategoryBytes> = found.lines.into_iter().map(CategoryBytes::new).collect();
    let at_peak = CategoryBytes::new(found.at_peak);
    let prediction = Prediction {
        peaks: CategoryBytes::new(found.peaks),
        at_peak,
        besides_activations: lines
            .iter()
            .chain([&at_peak])
            .map(CategoryBytes::besides_activations)
            .max()
            .unwrap_or(0),
        line: found.line,
        host: found.host,
        own: found.own,
        own_between_steps: found.own_between_steps,
        outside: found.outside,
    };
    Ok(DryRun { program, prediction, lines })
}

/// The prediction itself knows no budget.
fn device_options_without_budget(config: &Config, workers: Workers<'_>) -> DeviceOptions {
    let features_max = Some(workers.features);
    DeviceOptions { features_max, budget: None, ..device_options(config, workers.num_threads) }
}

/// The language model of a config.
pub(crate) fn language_model(config: &Config) -> Result<ModelConfig> {
    Ok(model_config(config, vocabulary_size(config)?)?.0)
}

/// The sequences of the config's corpus, if that is there; else of one in which all tokens are to be learned.
pub(crate) fn sequences_of(config: &Config) -> Sequences {
    let corpus = PrepareReport::read(&config.data().folder);
    Sequences::new(config, corpus.is_ok_and(|report| report.has_loss_mask))
}

/// The vocabulary of the config's corpus, or what it will be when it is prepared.
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
        // The model's own counts, and it is not smaller.
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

/// What a device has held at most, by category and together.
pub(crate) fn measured(device: &Device) -> (CategoryBytes, usize) {
    let peaks = Category::ALL.map(|category| device.memory().usage(category).peak);
    (CategoryBytes::new(peaks), device.memory().total().peak)
}
