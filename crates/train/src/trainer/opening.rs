//! Opens a run on a rank. All checks precede the first write.

use super::{Trainer, TrainerOptions, stepping};
use crate::agreement::{Facts, agree};
use crate::balance::Rebalancer;
use crate::checkpointing::{TrainingState, checkpoint_bytes};
use crate::choices::StepChoices;
use crate::compression::notice_compression;
use crate::config::{Config, Resume, TaskKind};
use crate::corpus::record_use;
use crate::dataset::{Dataset, batch_specs};
use crate::device::{check_gpu_memory, enable_spill, local_gpu, open_device};
use crate::error::TrainError;
use crate::executor::build_executor;
use crate::metrics::{HashWriter, MetricsWriter, check_names};
use crate::model_profile::infer_profile;
use crate::nccl::{connect_gpus, staging_notice};
use crate::notices::{notice_cuda, notice_determinism, notice_epochs, notice_fp8, notice_staleness};
use crate::observer::Observer;
use crate::optimizer::lr_schedule;
use crate::preflight::check_room;
use crate::requests::Requests;
use crate::resume::{clean_up_after_resume, resume};
use crate::run_folder;
use crate::run_lock::RunLock;
use crate::task::{Samples, Task};
use crate::time_limit::TimeLimit;
use crate::trace::Tracer;
use crate::utilization::Utilization;
use crate::validation::Validation;
use std::sync::Arc;
use std::time::{Duration, Instant};
use trireme_base::Rank;
use trireme_checkpoint::Checkpoint;
use trireme_comm::Group;
use trireme_model::{HostBatch, Model, TensorSpec};
use trireme_parallel::Executor;
use trireme_tensor::{Device, DeviceError};

impl<'a> Trainer<'a> {
    /// Opens the samples, builds the model, loads the checkpoint to resume from if there is one, and opens the run's files. Collective: all
    /// ranks of `group` call it with the same config and the same task.
    ///
    /// # Errors
    /// If the samples, the model, the checkpoint to resume from or a file of the run cannot be opened, if the ranks disagree about the
    /// config, the task or their GPUs, if a GPU cannot be used, or if there is too little memory or disk space.
    pub fn new(
        config: &'a Config,
        task: Arc<dyn Task>,
        group: Group,
        options: TrainerOptions,
        observer: &'a mut dyn Observer,
    ) -> Result<Self, TrainError> {
        let training = config.training();
        let is_root = group.rank() == Rank::ROOT;
        let lock = if is_root { Some(RunLock::of_run(config)?) } else { None };
        let Samples { train, validation } = Samples::open(&*task, config)?;
        let facts = Facts::of_config(config, options.simd_level_max);
        let local_rank = local_rank(&group, &options);
        let gpu = local_gpu(config, local_rank).map_err(DeviceError::from)?;
        let facts = facts.merged_with(Facts::of_gpu(gpu.as_ref()));
        agree(&facts.merged_with(Facts::of_task(&*task, &*train, validation.as_deref())), &group)?;
        notice_settings(config, &*task, observer);

        let batch_specs = batch_specs(&*train, training.local_batch_size);
        let device = open_device(config, local_rank, options.num_threads, options.simd_level_max)?;
        if let Some(gpu) = gpu.filter(|_| group.world_size() > 1) {
            let must_encrypt = config.comm().tls_certificate.is_some();
            let obstacle = connect_gpus(&group, &device, &gpu, config.comm().nccl, must_encrypt)?;
            if let Some(reason) = obstacle.filter(|_| is_root) {
                observer.notice(&staging_notice(&reason));
            }
        }
        let built = PreparedExecutor::new(config, &*task, &batch_specs, group, &device, &options)?;
        let PreparedExecutor { mut executor, choices, rebalancer, utilization } = built;
        if let Some(plan) = &options.plan {
            check_gpu_memory(executor.device(), plan.predicted.total)?;
        }
        let reserved = options.plan.as_ref().map_or(0, |plan| plan.non_activation_bytes);
        let spill = enable_spill(config, executor.device(), reserved);
        let validation =
            validation.map(|samples| Validation::new(samples, training, &mut executor)).transpose()?;
        notice_compression(&executor, observer)?;
        if is_root && config.checkpoint().enable {
            let notice = check_room(config, checkpoint_bytes(&executor))?;
            notice.iter().for_each(|notice| observer.notice(notice));
        }
        let prometheus = if is_root { run_folder::listen(config)? } else { None };
        check_names(&executor.profile().metric_names())?;

        let (state, resumed) =
            begin_or_resume(config, &*task, &mut executor, &*train, validation.as_ref(), observer)?;
        executor.describe_disks().iter().for_each(|line| observer.notice(line));
        notice_epochs(config, &*train, observer);
        let (metrics, hashes) = if is_root {
            let (mut metrics, hashes) = open_files(config, &options, &executor, state.step)?;
            metrics.prometheus = prometheus;
            (Some(metrics), hashes)
        } else {
            (None, None)
        };
        if let Some(resumed) = resumed.as_ref().filter(|_| is_root) {
            clean_up_after_resume(
                config,
                resumed,
                &state.validations,
                executor.group().heartbeat(),
                observer,
            );
        }
        let ends_at = options.ends_at.filter(|_| is_root);
        let mut trainer = Trainer {
            config,
            observer,
            is_new: resumed.is_none(),
            requests: Requests(executor.requests()),
            saved_at: Instant::now(),
            time_limit: ends_at.map(|end| TimeLimit::new(Instant::now(), end, config.checkpoint().enable)),
            options,
            executor,
            task,
            host_batch: HostBatch::new(&batch_specs),
            choices,
            rebalancer,
            spill,
            has_reported_spill: false,
            has_reported_pinning: false,
            moved_after: None,
            train,
            validation,
            schedule: lr_schedule(config),
            state,
            metrics,
            hashes,
            tracer: Tracer::new(&config.run_folder()),
            utilization,
            program_time: Duration::ZERO,
            num_algorithm_choices: 0,
            batches: Vec::new(),
            step_plans: Vec::new(),
            outcomes: Vec::new(),
            records: Vec::new(),
            first_step_seconds: Vec::with_capacity(stepping::NUM_COMPARED),
            reported: Vec::new(),
            _lock: lock,
        };
        trainer.begin_hashes()?;
        Ok(trainer)
    }
}

fn notice_settings(config: &Config, task: &dyn Task, observer: &mut dyn Observer) {
    task.notices().iter().for_each(|notice| observer.notice(notice));
    let num_reducing = config.data_parallel_degree() * config.parallelism().context_parallel_degree;
    notice_determinism(config, num_reducing, observer);
    notice_staleness(config, observer);
    notice_fp8(config, observer);
    notice_cuda(config, observer);
}

/// Returns the rank of this worker among the workers of its host, as its launcher or else the group tells it.
fn local_rank(group: &Group, options: &TrainerOptions) -> usize {
    let local_ranks = group.hosts().ranks(group.hosts().host_of(group.rank()));
    let place = local_ranks.iter().position(|&rank| rank == group.rank());
    options.local_rank.or(place).unwrap_or(0)
}

/// The executor of this rank, and the values that are derived while it is built.
struct PreparedExecutor {
    executor: Executor,
    choices: StepChoices,
    rebalancer: Option<Rebalancer>,
    utilization: Utilization,
}

impl PreparedExecutor {
    /// Builds the model with its initial weights, for batches of `batch_specs`. Collective.
    fn new(
        config: &Config,
        task: &dyn Task,
        batch_specs: &[TensorSpec],
        group: Group,
        device: &Device,
        options: &TrainerOptions,
    ) -> Result<Self, TrainError> {
        let TrainerOptions { num_threads, peak_flops, .. } = *options;
        let profile = infer_profile(config, task, group.rank(), num_threads, batch_specs)?;
        let utilization =
            Utilization::new(config, task, &profile, batch_specs, &group, num_threads, peak_flops)?;
        let build = |device: &Device, table| task.build(device, table);
        let model = Model::build_at(config.model_rank(group.rank()), device, build)?;
        let choices = match &options.plan {
            Some(plan) => plan.choices.clone(),
            None => {
                // The costs of passes may differ between ranks of the tensor axis, but their choices must not.
                let own = StepChoices::from_config(config, &profile.passes())?;
                let is_root = group.rank() == Rank::ROOT;
                StepChoices::broadcast_from_root(is_root.then_some(&own), &group)?.unwrap_or(own)
            }
        };
        let rebalancer = Rebalancer::new(config, profile.passes());
        let executor = build_executor(config, model, profile, &choices, group, device)?;
        Ok(PreparedExecutor { executor, choices, rebalancer, utilization })
    }
}

/// Loads the checkpoint that the run resumes from, if there is one. Collective.
fn begin_or_resume(
    config: &Config,
    task: &dyn Task,
    executor: &mut Executor,
    train: &dyn Dataset,
    validation: Option<&Validation>,
    observer: &mut dyn Observer,
) -> Result<(TrainingState, Option<Checkpoint>), TrainError> {
    // The earlier run is moved as late as possible: after the checks of the config, the task, the model and the disk.
    if executor.group().rank() == Rank::ROOT && config.checkpoint().resume == Resume::Never {
        run_folder::set_aside(&config.run_folder(), observer)?;
    }
    let (mut state, resumed) = resume(config, task, executor, train, observer)?;
    match validation {
        None if config.training().validation_interval > 0 => observer
            .notice("nothing is held out for validation, so [training] validation_interval has no effect"),
        None => {}
        Some(validation) => {
            if let Some(difference) = state.validations.begin(validation.identity()) {
                observer.notice(&format!(
                    "the validation samples differ from those of the checkpoint ({difference}), so the lowest validation loss and \
                     the count of early stopping start again"
                ));
            }
        }
    }
    let num_steps = config.steps_per_program() as u64;
    if state.step.is_multiple_of(num_steps) {
        Ok((state, resumed))
    } else {
        Err(TrainError::ResumedWithinProgram { step: state.step, num_steps })
    }
}

/// Writes the description of a run that continues after `step`, and opens its metrics and hashes. Called on rank 0.
fn open_files(
    config: &Config,
    options: &TrainerOptions,
    executor: &Executor,
    step: u64,
) -> Result<(MetricsWriter, Option<HashWriter>), TrainError> {
    if config.task_kind() == TaskKind::LanguageModel {
        record_use(config);
    }
    let comment = options.plan.as_ref().map_or("", |plan| &plan.comment);
    let metrics = run_folder::open(config, comment, options.given_config.as_deref(), executor, step)?;
    Ok((metrics, run_folder::open_hashes(config, step)?))
}
