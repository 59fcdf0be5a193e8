//! The loop of a run on one rank.

mod hashing;
mod opening;
mod recording;
mod saving;
mod stepping;
mod validating;

use crate::balance::Balance;
use crate::checkpointing::TrainingState;
use crate::choices::StepChoices;
use crate::config::{Config, Interval};
use crate::dataset::Dataset;
use crate::error::TrainError;
use crate::metrics::{HashWriter, MemoryPeakBytes, MetricsWriter, StepRecord};
use crate::observer::{Observer, RunFacts};
use crate::programs::proven_programs;
use crate::requests::{Requested, Requests, StoppedBy};
use crate::run_folder;
use crate::run_lock::RunLock;
use crate::task::Task;
use crate::time_limit::TimeLimit;
use crate::trace::Tracer;
use crate::utilization::Utilization;
use crate::validation::{Validated, Validation};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use trireme_model::{Batch, HostBatch};
use trireme_optim::LrSchedule;
use trireme_parallel::{Executor, Spill, StepOutcome, StepPlan};
use trireme_tensor::{CpuFeatures, Parameters};

/// What a trainer needs to know of its process.
#[derive(Debug, Clone)]
pub struct TrainerOptions {
    /// Threads of this worker.
    pub num_threads: usize,
    /// Kernels use no higher SIMD level than this; `None` means the highest that the machine has.
    pub features_max: Option<CpuFeatures>,
    /// When the command started, for `seconds_to_first_step`.
    pub started: Instant,
    /// Peak FLOP/s of this worker in the training dtype, for MFU, if it is known. `[metrics] peak_flops` takes precedence.
    pub peak_flops: Option<f64>,
    /// What was planned for this worker; alike on all workers but for the predictions. What the config leaves to a
    /// plan is kept, on the device, without it.
    pub plan: Option<WorkerPlan>,
    /// When the process must have ended, if it must; only rank 0's counts.
    pub ends_at: Option<Instant>,
    /// The [config as it was given](Config::given), to be kept with the run.
    pub given_config: Option<String>,
}

/// What a planner has found out about a worker's steps.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkerPlan {
    /// What is recomputed and moved.
    pub choices: StepChoices,
    /// What the worker will take at most.
    pub predicted: MemoryPeakBytes,
    /// Bytes that all but activations will take at most at a time.
    pub besides_activations: usize,
    /// How long a step is predicted to take, if that is known on this worker.
    pub step_seconds: Option<f64>,
    /// Why it is so, for whoever reads the step program.
    pub comment: String,
}

/// What a run has come to.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RunSummary {
    /// Steps done, those of earlier runs included.
    pub step: u64,
    /// Loss of the last step of this run that had one, if any did.
    pub loss: Option<f64>,
    /// Last validation loss.
    pub validation_loss: Option<f64>,
    /// Last checkpoint that was written, with its step.
    pub checkpoint: Option<(u64, PathBuf)>,
    /// The step and the loss of the validation with the lowest loss, earlier runs' included.
    pub best_validation: Option<(u64, f64)>,
    /// Why the run ended before its last step, if it did and was asked to.
    pub stopped_by: Option<StoppedBy>,
    /// From the start of the command to the end of the first step of this run.
    pub seconds_to_first_step: Option<f64>,
}

/// One rank of a run.
pub struct Trainer<'a> {
    config: &'a Config,
    observer: &'a mut dyn Observer,
    options: TrainerOptions,
    executor: Executor,
    task: Arc<dyn Task>,
    host_batch: HostBatch,
    choices: StepChoices,
    balance: Option<Balance>,
    /// Where activations go that uneven loads leave no room for.
    spill: Option<Arc<Spill>>,
    has_told_of_spill: bool,
    /// The step after which units moved for the last time, if they did.
    moved_after: Option<u64>,
    train: Box<dyn Dataset>,
    validation: Option<Validation>,
    schedule: LrSchedule,
    state: TrainingState,
    metrics: Option<MetricsWriter>,
    /// On rank 0, if the run records hashes.
    hashes: Option<HashWriter>,
    tracer: Tracer,
    utilization: Utilization,
    /// Duration of the last run of the program, including the reading of its batches.
    program_time: Duration,
    /// Algorithms that the run's folder tells of.
    num_choices: usize,
    batches: Vec<Batch>,
    /// Of the program that runs, or ran last.
    plans: Vec<StepPlan>,
    outcomes: Vec<StepOutcome>,
    records: Vec<StepRecord>,
    /// Seconds of the first steps of a run whose steps' time was predicted.
    first_seconds: Vec<f64>,
    /// Whether it begins without a checkpoint.
    is_new: bool,
    /// Of this rank.
    requests: Requests,
    /// When the last checkpoint was written, or the run began.
    saved_at: Instant,
    /// On rank 0, if the run has one.
    time_limit: Option<TimeLimit>,
    /// What the user was told of once.
    reported: Vec<String>,
    _lock: Option<RunLock>,
}

impl<'a> Trainer<'a> {
    /// Trains to the last step. Collective.
    pub fn run(&mut self) -> Result<RunSummary, TrainError> {
        self.run_until(self.config.training().steps)
    }

    /// Trains until step `end` is done, or the last step if that comes first. Collective.
    pub fn run_until(&mut self, end: u64) -> Result<RunSummary, TrainError> {
        let training = self.config.training();
        self.observer.begin(&self.facts());
        let mut summary = RunSummary { step: self.state.step, ..RunSummary::default() };
        self.notice_ended();
        let mut initial = self.validate_at_start()?;
        if training.steps == 0 && self.is_new {
            summary.validation_loss = initial.take().map(|validated| validated.loss);
            self.save_last(&mut summary)?;
        }
        while self.state.step < end.min(training.steps) && !self.is_patience_over() {
            self.advance()?;
            for index in 0..self.records.len() {
                // It is put back, so that the next one allocates nothing.
                let mut record = std::mem::take(&mut self.records[index]);
                record.initial_validation_loss = initial.take().map(|validated| validated.loss);
                self.finish_step(&mut record, &mut summary)?;
                self.records[index] = record;
            }
            self.write_choices()?;
            if self.state.step == training.steps {
                break;
            }
            summary.stopped_by = Requested(self.executor.requested()).stop();
            if self.is_patience_over() {
                let (num_since, step) = (self.state.validations.num_since, self.state.step);
                self.observer.notice(&format!(
                    "stopping early after step {step}: no lower loss in {num_since} validations"
                ));
            }
            if self.is_patience_over() || summary.stopped_by.is_some() {
                self.save_last(&mut summary)?;
                break;
            }
            self.rebalance()?;
        }
        if let Some(metrics) = &mut self.metrics {
            metrics.finish()?;
        }
        if let Some(hashes) = &mut self.hashes {
            hashes.finish()?;
        }
        let validations = &self.state.validations;
        summary.best_validation =
            validations.best_step.map(|step| (step, f64::from_bits(validations.best_loss)));
        Ok(summary)
    }

    /// What follows a step of a program. Where the program has several, what needs their weights comes after the last one, at
    /// whose multiples the config has it.
    fn finish_step(&mut self, record: &mut StepRecord, summary: &mut RunSummary) -> Result<(), TrainError> {
        let training = self.config.training();
        if record.step == self.state.step {
            self.trace()?;
        }
        if summary.seconds_to_first_step.is_none() {
            record.seconds_to_first_step = Some(self.options.started.elapsed().as_secs_f64());
            summary.seconds_to_first_step = record.seconds_to_first_step;
        }
        let step = record.step;
        let is_last = step == training.steps;
        let interval = training.validation_interval;
        let is_due = is_last || (interval > 0 && step.is_multiple_of(interval));
        let mut is_best = false;
        if is_due && let Some(Validated { loss, metrics }) = self.validate()? {
            record.validation_loss = Some(loss);
            record.validation_metrics = metrics;
            summary.validation_loss = Some(loss);
            is_best = self.state.validations.add(step, loss);
        }
        self.write_metrics(record)?;
        self.observer.step(record);
        summary.step = step;
        summary.loss = Some(record.loss).filter(|loss| !loss.is_nan()).or(summary.loss);
        let keeps_best = is_best && self.config.keeps_best() && step == self.state.step;
        let is_due = match self.config.checkpoint().interval {
            _ if is_last || keeps_best => true,
            Interval::Steps(steps) => step.is_multiple_of(steps),
            // Weights of other steps of a program are gone.
            Interval::Time(_) => step == self.state.step && Requested(self.executor.requested()).checkpoint(),
        };
        if is_due {
            self.save(is_last, summary)?;
        }
        let is_saved = summary.checkpoint.as_ref().is_some_and(|(saved, _)| *saved == step);
        if keeps_best && is_saved && self.metrics.is_some() {
            self.keep_best(step);
        }
        Ok(())
    }

    /// Rank 0 asks for the end of the run when its time might not suffice for another step after the one that begins.
    fn request_end(&mut self) {
        if self.time_limit.as_mut().is_some_and(|limit| limit.begin_step(Instant::now())) {
            self.requests.stop_in_time();
            self.report_once("the time limit is near; the run saves what it has, and ends".to_owned());
        }
    }

    /// Lets units move to where they even out the work, if its turn has come and it is worth it. Collective.
    fn rebalance(&mut self) -> Result<(), TrainError> {
        let (step, group) = (self.state.step, self.executor.group());
        let Some(balance) = &mut self.balance else { return Ok(()) };
        group.set_line(format_args!("step {step}: pipeline balance"));
        let Some(found) = balance.decide(step, self.config, &self.choices, &self.executor)? else {
            return Ok(());
        };
        let place = self.executor.ranks().pipeline().rank().0;
        let chain = &self.executor.program().outline.chain;
        let programs = proven_programs(self.config, chain, &found.choices);
        self.executor.relocate(programs?.swap_remove(place))?;
        balance.forget();
        self.choices = found.choices;
        self.moved_after = Some(step);
        // They were of stages that are no more.
        self.options.plan = None;
        self.tracer.forget();
        for device in [self.executor.device(), self.executor.host()] {
            device.memory().restart_peaks();
        }
        if self.metrics.is_some() {
            run_folder::write_program(self.config, self.executor.program(), &found.reason)?;
        }
        self.observer.notice(&found.reason);
        Ok(())
    }

    /// One training step; the last one of a program that has several.
    pub fn step(&mut self) -> Result<&StepRecord, TrainError> {
        self.advance()?;
        Ok(self.records.last().expect("a program has steps"))
    }

    fn facts(&self) -> RunFacts {
        let training = self.config.training();
        RunFacts {
            model: self.task.description(),
            num_parameters: self.executor.model().table().whole().num_elements(),
            world_size: self.executor.group().world_size(),
            num_threads: self.options.num_threads,
            transport: self.executor.group().transport().to_string(),
            num_samples: self.train.num_samples(),
            samples_per_step: training.global_batch_size as u64,
            tokens_per_sample: self.train.tokens_per_sample(),
            resumed_step: self.state.step,
            steps: training.steps,
        }
    }

    /// Model, parameters and device.
    pub fn executor(&self) -> &Executor {
        &self.executor
    }

    /// What is left open by the layout, as it is now: units may have moved.
    pub fn choices(&self) -> &StepChoices {
        &self.choices
    }

    /// By which any thread can ask all ranks for something.
    pub fn requests(&self) -> Requests {
        self.requests.clone()
    }

    /// The step after which units moved between workers for the last time, if they did. Peaks of memory are of the steps since
    /// then.
    pub fn moved_after(&self) -> Option<u64> {
        self.moved_after
    }

    /// All parameters, in the host's memory at rank 0; `None` for the other ranks. Collective.
    pub fn gather_parameters(&mut self) -> Result<Option<Parameters>, TrainError> {
        Ok(self.executor.gather_parameters()?)
    }
}
