//! A worker's plan: its step program, with the predicted memory and time.

use super::host_bytes::HostBytes;
use super::limits;
use super::planned_run::{PlannedRun, Workers};
use super::probe::{MeasuredRates, MeasuredStep};
use super::sizes::{batch_memory, state_sizes};
use anyhow::Result;
use trireme_base::{Bytes, MemoryUse, Rank, StepEntries, UnitPasses};
use trireme_comm::Group;
use trireme_model::{Model, ModelProfile};
use trireme_optim::Optimizer;
use trireme_parallel::{Executor, Placements, ValidationBatches, chain};
use trireme_planner::{
    DryRun, MemoryBounds, MemoryChoices, MemorySearch, OpenChoices, StepTime, peak_location, step_time,
};
use trireme_schedule::Program;
use trireme_tensor::{Device, DeviceOptions, RecordedCalls};
use trireme_train::config::{ActivationCheckpointMode, Config, Tier};
use trireme_train::metrics::MemoryPeakBytes;
use trireme_train::{
    StepChoices, TrainError, WorkerPlan, base_programs, device_options, executor_options, lowered,
    new_executor, optimizer_options, proven_programs, step_programs,
};

pub(crate) struct PredictedTime {
    pub(crate) time: StepTime,
    /// Kernels and operations that were not measured, and count as no time.
    pub(crate) unmeasured: Vec<&'static str>,
}

/// Memory that has a limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Limit {
    /// Memory of the device, limited by the config.
    Device,
    /// Host memory for state that is not on the device, limited by the config.
    Offload,
    /// Memory of the workers of a host together, limited by the machine or a control group. Holds the index of the limit.
    Host(usize),
}

/// The step program of one worker, with its predicted memory.
pub(crate) struct Plan {
    pub(crate) rank: usize,
    pub(crate) model: Model,
    pub(crate) passes: Vec<UnitPasses>,
    pub(crate) program: Program,
    pub(crate) choices: StepChoices,
    pub(crate) prediction: MemoryUse,
    /// The config's budgets, and the worker's share of the host's limits.
    bounds: MemoryBounds,
    /// Predicted memory of all workers of this host together.
    pub(super) on_host: HostBytes,
    /// The choices that were left to the planner, with their reasons.
    pub(crate) reasons: Vec<String>,
}

impl Plan {
    /// Plans one worker. `chosen` is the choices of another worker; without it, this worker chooses.
    pub(crate) fn new(job: PlannedRun<'_>, chosen: Option<StepChoices>) -> Result<Self> {
        let PlannedRun { config, workers, .. } = job;
        let mut plan = Plan::of_worker(job, chosen)?;
        let place = |workers: Workers<'_>| workers.rank / config.workers_per_pipeline_rank();
        let mut on_host = HostBytes::of_launcher(workers);
        for (worker, num_workers) in
            workers.by_pipeline_rank(config).into_iter().filter(|(_, num_workers)| *num_workers > 0)
        {
            if place(worker) == place(workers) {
                on_host.add(&plan, config, num_workers);
            } else {
                let chosen = Some(plan.choices.clone());
                let plan = Plan::of_worker(PlannedRun { workers: worker, ..job }, chosen)?;
                on_host.add(&plan, config, num_workers);
            }
        }
        plan.on_host = on_host;
        Ok(plan)
    }

    /// Plans one worker for each pipeline rank, and returns the plan that needs the most memory. The first worker chooses for all.
    pub(crate) fn largest(job: PlannedRun<'_>) -> Result<Self> {
        let PlannedRun { config, workers, .. } = job;
        let need = |plan: &Plan| (plan.prediction.host > plan.bounds.host, plan.prediction.total());
        let mut places = workers.by_pipeline_rank(config).into_iter();
        let (worker, num_workers) = places.next().expect("a pipeline has a place");
        let mut largest = Plan::of_worker(PlannedRun { workers: worker, ..job }, None)?;
        let mut on_host = HostBytes::of_launcher(workers);
        on_host.add(&largest, config, num_workers);
        for (worker, num_workers) in places {
            let plan = Plan::of_worker(PlannedRun { workers: worker, ..job }, Some(largest.choices.clone()))?;
            on_host.add(&plan, config, num_workers);
            if need(&plan) > need(&largest) {
                largest = Plan { reasons: largest.reasons, ..plan };
            }
        }
        Ok(Plan { on_host, ..largest })
    }

    /// Like [`new`](Plan::new), without the memory of the other workers of the host.
    fn of_worker(job: PlannedRun<'_>, chosen: Option<StepChoices>) -> Result<Self> {
        let PlannedRun { config, workers, .. } = job;
        let (model, profile) = model_and_profile(job)?;
        let device = Device::counting(device_options_without_budget(config, workers))?;
        let (optimizer, options) = (optimizer_options(config, model.table())?, executor_options(config));
        let num_shards = config.num_shards();
        let (passes, chain) = (profile.passes(), chain(model.table(), &profile, options.determinism));
        let is_open = chosen.is_none();
        let given = chosen.map_or_else(|| StepChoices::from_config(config, &passes), Ok)?;
        if is_open {
            // The choices of another worker are proven already.
            proven_programs(config, &chain, &given)?;
        }
        let base = base_programs(config, &chain, &given)?;
        let program = |place: usize, choices: &StepChoices| lowered(base[place].clone(), choices);
        let places = workers.by_pipeline_rank(config);
        let mesh = config.degrees().state_mesh(workers.world_size);
        let sizes = |place: usize| {
            let header = &program(place, &given).header;
            let placements = Placements::new(model.table(), header, mesh.clone());
            let parts = placements.parts(model.table(), Rank(places[place].0.rank));
            let optimizer = Optimizer::new(&optimizer, model.table(), &parts, &device)?;
            anyhow::Ok(state_sizes(&profile, &options, optimizer, &parts, num_shards, header))
        };
        let bounds = limits::bounds(config, workers);
        let validation = job.workload.validation(config)?;
        let with = |MemoryChoices { keeps, state }: &MemoryChoices| StepChoices {
            keeps: keeps.clone(),
            state: *state,
            ..given.clone()
        };
        let run = |place: usize, choices: &MemoryChoices| {
            let job = PlannedRun { workers: places[place].0, ..job };
            dry_run(job, &profile, program(place, &with(choices)), validation)
        };
        let search = MemorySearch {
            sizes: &sizes,
            passes: &passes,
            batch: &batch_memory(&profile),
            bounds,
            num_pipeline_ranks: places.len(),
            program: &|place, choices| program(place, &with(choices)),
            run: &run,
        };
        let (choices, mut reasons) = if is_open {
            let given = MemoryChoices { keeps: given.keeps.clone(), state: given.state };
            let (choices, reasons) = search.choose(given, &open_choices(config))?;
            (with(&choices), reasons)
        } else {
            (given.clone(), Vec::new())
        };
        reasons.extend(limits::budget_notice(config, workers, bounds));
        let place = workers.rank / config.workers_per_pipeline_rank();
        let DryRun { program, memory: prediction, .. } =
            dry_run(job, &profile, program(place, &choices), validation)?;
        let (rank, on_host) = (workers.rank, HostBytes::of_launcher(workers));
        Ok(Plan { rank, model, passes, program, choices, prediction, bounds, on_host, reasons })
    }

    /// Predicts the time of a step on this machine. All workers of the job, which form the group `world`, measure its kernels and links for
    /// some seconds. Returns the prediction on the first worker, `None` on the others. Collective.
    pub(crate) fn step_time(&self, job: PlannedRun<'_>, world: Group) -> Result<Option<PredictedTime>> {
        let PlannedRun { config, workers, .. } = job;
        let (model, profile) = model_and_profile(job)?;
        let chain = chain(model.table(), &profile, executor_options(config).determinism);
        let programs = step_programs(config, &chain, &self.choices)?;
        let calls = RecordedCalls::default();
        let entries = |((worker, _), program): ((Workers<'_>, usize), &Program)| {
            let executor = dry_executor(PlannedRun { workers: worker, ..job }, &profile, program.clone())?;
            executor.device().record_calls(&calls);
            Ok(executor.dry_run_entries().map_err(TrainError::from)?)
        };
        let stages: Vec<StepEntries> = workers
            .by_pipeline_rank(config)
            .into_iter()
            .zip(&programs)
            .map(entries)
            .collect::<Result<_>>()?;
        let (rank, workers_per_pipeline_rank) = (world.rank(), config.workers_per_pipeline_rank());
        let header = &programs[rank.0 / workers_per_pipeline_rank].header;
        let mesh = config.degrees().state_mesh(world.world_size());
        let parts = Placements::new(model.table(), header, mesh).parts(model.table(), rank);
        let step =
            MeasuredStep { stages: &stages, model: &model, profile: &profile, parts: &parts, calls: &calls };
        let rates = MeasuredRates::measure(job, step, self.bounds.machine, world)?;
        let Some(rates) = rates else { return Ok(None) };
        let mut time = step_time(&stages, workers_per_pipeline_rank, &rates)?;
        // A program that does not drain has several steps.
        let num_steps = header.num_steps() as f64;
        time.compute_seconds.iter_mut().chain([&mut time.seconds]).for_each(|seconds| *seconds /= num_steps);
        Ok(Some(PredictedTime { time, unmeasured: rates.unmeasured(&stages) }))
    }

    /// Returns the bytes that count against `limit`, and the limit in bytes.
    pub(super) fn used_and_limit(&self, limit: Limit) -> (usize, usize) {
        match limit {
            Limit::Device => (self.prediction.total(), self.bounds.device),
            Limit::Offload => (self.prediction.host, self.bounds.host),
            Limit::Host(index) => {
                let bound = self.on_host.limit(index).bytes;
                (self.on_host.taken(index), usize::try_from(bound).unwrap_or(usize::MAX))
            }
        }
    }

    /// Returns the limit that the plan exceeds, if any.
    pub(crate) fn exceeded_limit(&self) -> Option<Limit> {
        let limits = [Limit::Device, Limit::Offload, Limit::Host(self.on_host.most_used_limit())];
        limits
            .into_iter()
            .find(|&limit| matches!(self.used_and_limit(limit), (taken, bound) if taken > bound))
    }

    /// Returns the predicted peak of each category of the device's memory, and of their sum.
    pub(crate) fn memory_peak_bytes(&self) -> MemoryPeakBytes {
        MemoryPeakBytes { categories: self.prediction.peaks, total: self.prediction.total() }
    }

    pub(crate) fn worker_plan(&self, step_seconds: Option<f64>) -> WorkerPlan {
        let total = self.prediction.total();
        let moment = peak_location(&self.prediction, &self.program);
        let predicted = format!("predicted peak: {} at {moment}", Bytes(total as u64));
        WorkerPlan {
            step_seconds,
            choices: self.choices.clone(),
            predicted: self.memory_peak_bytes(),
            non_activation_bytes: self.prediction.excluding_activations,
            comment: self.reasons.iter().cloned().chain([predicted]).collect::<Vec<_>>().join("\n"),
        }
    }
}

/// Returns the memory choices whose keys are `auto`, which are left to the planner.
pub(crate) fn open_choices(config: &Config) -> OpenChoices {
    let open = config.offload().tiers().into_iter().filter(|(_, tier)| *tier == Tier::Auto);
    let keeps = config.activation_checkpoint().mode == ActivationCheckpointMode::Auto;
    OpenChoices { may_choose_keeps: keeps, offloadable: open.map(|(class, _)| class).collect() }
}

/// Builds the model of a job, and infers the shapes, memory and cost of its passes.
pub(super) fn model_and_profile(job: PlannedRun<'_>) -> Result<(Model, ModelProfile)> {
    let PlannedRun { config, workload, workers, .. } = job;
    let device = Device::counting(device_options_without_budget(config, workers))?;
    let place = config.model_rank(Rank(workers.rank));
    let model = workload.build(&device, place).map_err(TrainError::from)?;
    let context = config.context_rank(Rank(workers.rank));
    let batch = workload.batch(config, context)?;
    let profile = model.profile(&device, executor_options(config).pass_options(context), &batch);
    Ok((model, profile.map_err(TrainError::from)?))
}

/// Creates the executor of a job's worker in a dry world, on a device that only counts.
pub(super) fn dry_executor(
    job: PlannedRun<'_>,
    profile: &ModelProfile,
    program: Program,
) -> Result<Executor> {
    let PlannedRun { config, workload, workers, .. } = job;
    let device = Device::counting(device_options_without_budget(config, workers))?;
    let model = workload.build(&device, config.model_rank(Rank(workers.rank))).map_err(TrainError::from)?;
    let group = workers.dry_group(config)?;
    if limits::uses_nccl(config, workers)
        && let Some(transport) = device.transport().map_err(TrainError::from)?
    {
        group.set_device_transport(transport);
    }
    Ok(new_executor(config, model, profile.clone(), program, group, &device)?)
}

/// Dry-runs the program of a job's worker, and a validation.
fn dry_run(
    job: PlannedRun<'_>,
    profile: &ModelProfile,
    program: Program,
    validation: Option<ValidationBatches>,
) -> Result<DryRun> {
    let executor = dry_executor(job, profile, program.clone())?;
    let (prediction, action_peaks) = executor.dry_run(validation).map_err(TrainError::from)?;
    Ok(DryRun { program, memory: prediction, action_peaks })
}

/// Returns the options of a device without a budget, because exceeding a budget must not end a prediction.
fn device_options_without_budget(config: &Config, workers: Workers<'_>) -> DeviceOptions {
    let simd_level_max = Some(workers.simd_level);
    DeviceOptions { simd_level_max, budget: None, ..device_options(config, workers.num_threads) }
}
