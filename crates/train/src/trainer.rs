//! The training loop of one rank.

mod hashing;
mod opening;
mod recording;
mod saving;
mod stepping;
mod validating;

use crate::balance::Rebalancer;
use crate::checkpointing::TrainingState;
use crate::choices::StepChoices;
use crate::config::{Config, Interval};
use crate::dataset::Dataset;
use crate::error::TrainError;
use crate::metrics::{HashWriter, MemoryPeakBytes, MetricsWriter, StepRecord};
use crate::observer::{Observer, RunInfo};
use crate::programs::proven_programs;
use crate::requests::{RequestBits, Requests, StoppedBy};
use crate::run_folder;
use crate::run_lock::RunLock;
use crate::task::Task;
use crate::time_limit::TimeLimit;
use crate::trace::Tracer;
use crate::utilization::Utilization;
use crate::validation::{Validation, ValidationResult};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use trireme_model::{Batch, HostBatch};
use trireme_optim::LrSchedule;
use trireme_parallel::{Executor, Spill, StepOutcome, StepPlan};
use trireme_tensor::{Parameters, SimdLevel};

/// Properties of the process in which a trainer runs.
#[derive(Debug, Clone)]
pub struct TrainerOptions {
    /// Number of threads of this worker.
    pub num_threads: usize,
    /// Rank of this worker among the workers of its host, which determines its GPU. `None` stands for its place among the ranks that the
    /// group finds on its host.
    pub local_rank: Option<usize>,
    /// The highest SIMD level that kernels may use. `None` stands for the highest level of the machine.
    pub simd_level_max: Option<SimdLevel>,
    /// The time at which the command started, for `seconds_to_first_step`.
    pub started: Instant,
    /// Peak FLOP/s of this worker in the training dtype, for MFU, if it is known. `[metrics] peak_flops` takes precedence.
    pub peak_flops: Option<f64>,
    /// The plan of this worker. All workers have the same plan, except for its predictions. Without a plan, choices that the config leaves
    /// to the planner have their defaults: activations are kept, and state is on the device.
    pub plan: Option<WorkerPlan>,
    /// The time at which the process must have ended, if there is a limit. Only the value of rank 0 counts.
    pub ends_at: Option<Instant>,
    /// The [config as the user gave it](Config::original_toml), which is stored with the run.
    pub given_config: Option<String>,
}

/// The plan of a worker's steps, with predictions.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkerPlan {
    /// The choices of recomputation, offloading and stages.
    pub choices: StepChoices,
    /// The predicted peak memory of the worker.
    pub predicted: MemoryPeakBytes,
    /// The predicted peak of the bytes of everything but activations.
    pub non_activation_bytes: usize,
    /// The predicted time of a step in seconds, if there is a prediction on this worker.
    pub step_seconds: Option<f64>,
    /// The reasons for the plan, which are written to the file of the step program.
    pub comment: String,
}

/// The result of a run.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RunSummary {
    /// Number of completed steps, including the steps of earlier runs that this one has resumed.
    pub step: u64,
    /// Loss of the last step of this run that had a loss, if there is one.
    pub loss: Option<f64>,
    /// Last validation loss.
    pub validation_loss: Option<f64>,
    /// Step and path of the last checkpoint that was written.
    pub checkpoint: Option<(u64, PathBuf)>,
    /// Step and loss of the validation with the lowest loss, including the validations of earlier runs.
    pub best_validation: Option<(u64, f64)>,
    /// The reason why the run ended before its last step, if a request ended it.
    pub stopped_by: Option<StoppedBy>,
    /// Seconds from the start of the command to the end of the first step of this run.
    pub seconds_to_first_step: Option<f64>,
}

/// The trainer of one rank of a run.
pub struct Trainer<'a> {
    config: &'a Config,
    observer: &'a mut dyn Observer,
    options: TrainerOptions,
    executor: Executor,
    task: Arc<dyn Task>,
    host_batch: HostBatch,
    choices: StepChoices,
    rebalancer: Option<Rebalancer>,
    /// The files to which activations spill if uneven loads leave no room for them.
    spill: Option<Arc<Spill>>,
    has_reported_spill: bool,
    has_reported_pinning: bool,
    /// The step after which units moved last, if they did.
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
    /// Number of algorithm choices that were written to the run's folder.
    num_algorithm_choices: usize,
    batches: Vec<Batch>,
    /// The plans of the steps of the program that runs, or ran last.
    step_plans: Vec<StepPlan>,
    outcomes: Vec<StepOutcome>,
    records: Vec<StepRecord>,
    /// Seconds of the run's first steps, if their time was predicted.
    first_step_seconds: Vec<f64>,
    /// Whether the run began without a checkpoint.
    is_new: bool,
    /// The handle for requests of this rank.
    requests: Requests,
    /// The time at which the last checkpoint was written, or the run began.
    saved_at: Instant,
    /// On rank 0, if the run has a time limit.
    time_limit: Option<TimeLimit>,
    /// Notices that are shown only once and were shown already.
    reported: Vec<String>,
    _lock: Option<RunLock>,
}

impl<'a> Trainer<'a> {
    /// Trains up to the last step. Collective.
    ///
    /// # Errors
    /// As [`run_until`](Trainer::run_until).
    pub fn run(&mut self) -> Result<RunSummary, TrainError> {
        self.run_until(self.config.training().steps)
    }

    /// Trains up to step `end`, or up to the last step if that is earlier. Collective.
    ///
    /// # Errors
    /// As [`step`](Trainer::step) and [`validate`](Trainer::validate), if units cannot be moved between ranks, and if a checkpoint or
    /// another file of the run cannot be written.
    pub fn run_until(&mut self, end: u64) -> Result<RunSummary, TrainError> {
        let training = self.config.training();
        self.observer.begin(&self.run_info());
        let mut summary = RunSummary { step: self.state.step, ..RunSummary::default() };
        self.notice_stopped_early();
        let mut initial = self.validate_at_start()?;
        if training.steps == 0 && self.is_new {
            summary.validation_loss = initial.take().map(|validated| validated.loss);
            self.save_last(&mut summary)?;
        }
        while self.state.step < end.min(training.steps) && !self.is_patience_over() {
            self.advance()?;
            for index in 0..self.records.len() {
                // The record is put back, so that its memory is reused.
                let mut record = std::mem::take(&mut self.records[index]);
                record.initial_validation_loss = initial.take().map(|validated| validated.loss);
                self.finish_step(&mut record, &mut summary)?;
                self.records[index] = record;
            }
            self.write_algorithm_choices()?;
            if self.state.step == training.steps {
                break;
            }
            summary.stopped_by = RequestBits(self.executor.requested()).stop();
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

    /// Finishes a step: writes the trace, validates, writes the metrics and saves a checkpoint, each if it is due. A program may have
    /// several steps. The weights are available only after its last step, so a valid config has intervals that are multiples of the steps
    /// per program.
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
        if is_due && let Some(ValidationResult { loss, metrics }) = self.validate()? {
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
            // The weights after the earlier steps of a program no longer exist.
            Interval::Time(_) => {
                step == self.state.step && RequestBits(self.executor.requested()).checkpoint()
            }
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

    /// On rank 0, requests the end of the run if the remaining time might not suffice for a step after the one that begins now.
    fn request_end(&mut self) {
        if self.time_limit.as_mut().is_some_and(|limit| limit.begin_step(Instant::now())) {
            self.requests.stop_at_time_limit();
            self.report_once("the time limit is near; the run saves what it has, and ends".to_owned());
        }
    }

    /// Moves units between ranks to balance the pipeline, if this is due and worthwhile. Collective.
    fn rebalance(&mut self) -> Result<(), TrainError> {
        let (step, group) = (self.state.step, self.executor.group());
        let Some(balance) = &mut self.rebalancer else { return Ok(()) };
        group.set_program_line(format_args!("step {step}: pipeline balance"));
        let Some(found) = balance.decide(step, self.config, &self.choices, &self.executor)? else {
            return Ok(());
        };
        let pipeline_rank = self.executor.ranks().pipeline().rank().0;
        let chain = &self.executor.program().header.chain;
        let programs = proven_programs(self.config, chain, &found.choices);
        self.executor.relocate(programs?.swap_remove(pipeline_rank))?;
        balance.clear_measurements();
        self.choices = found.choices;
        self.moved_after = Some(step);
        // The plan and the traced steps belong to the previous stages.
        self.options.plan = None;
        self.tracer.clear();
        for device in [self.executor.device(), self.executor.host()] {
            device.memory().reset_peaks();
        }
        if self.metrics.is_some() {
            run_folder::write_program(self.config, self.executor.program(), &found.reason)?;
        }
        self.observer.notice(&found.reason);
        Ok(())
    }

    /// Runs the step program once, and returns the record of its last step.
    ///
    /// # Errors
    /// Errors of [`Executor::run_steps`], and if samples cannot be read or hashes cannot be written.
    #[expect(clippy::missing_panics_doc, reason = "a program has at least one step")]
    pub fn step(&mut self) -> Result<&StepRecord, TrainError> {
        self.advance()?;
        Ok(self.records.last().expect("a program has steps"))
    }

    fn run_info(&self) -> RunInfo {
        let training = self.config.training();
        RunInfo {
            model: self.task.description(),
            num_parameters: self.executor.model().table().full().num_elements(),
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

    /// Returns the executor, which has the model, the parameters and the device.
    pub fn executor(&self) -> &Executor {
        &self.executor
    }

    /// Returns the current choices for steps. They change when units move.
    pub fn choices(&self) -> &StepChoices {
        &self.choices
    }

    /// Returns a handle by which any thread can send requests to all ranks.
    pub fn requests(&self) -> Requests {
        self.requests.clone()
    }

    /// Returns the step after which units last moved between workers, if they did. Memory peaks are measured since then.
    pub fn moved_after(&self) -> Option<u64> {
        self.moved_after
    }

    /// Gathers all parameters in the host memory of rank 0. Returns `None` on the other ranks. Collective.
    ///
    /// # Errors
    /// As [`Executor::gather_parameters`].
    pub fn gather_parameters(&mut self) -> Result<Option<Parameters>, TrainError> {
        Ok(self.executor.gather_parameters()?)
    }
}
