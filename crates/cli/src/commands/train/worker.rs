//! One rank of a run, from the plan to the closing report.

use super::outcome::{files_and_next_steps, loss_summary, memory_table, sample_text, stop_report};
use super::process::{ProcessContext, log_folder};
use crate::console::Console;
use crate::interrupts::Interrupts;
use crate::launch::{LaunchError, WorkerEnvironment, error_log, run_end};
use crate::machine_cache::MachineCache;
use crate::peak::worker_peak;
use crate::planning::{Limit, Plan, PlannedRun, PredictedTime, Workload, changes, open_choices};
use anyhow::{Context, Error, Result, anyhow, bail};
use signal_hook::consts::SIGUSR1;
use std::sync::Arc;
use trireme_base::Rank;
use trireme_comm::Group;
use trireme_tensor::OverBudget;
use trireme_train::config::{Bind, Config};
use trireme_train::{
    LanguageTask, Observer, RunSummary, Samples, StepChoices, StoppedBy, Task, TrainError, Trainer,
    TrainerOptions, local_threads,
};

/// Trains on one rank of `group`; rank 0 shows the run and its outcome.
pub(super) fn train(config: &Config, group: Group, process: ProcessContext<'_>) -> Result<()> {
    let is_root = group.rank() == Rank::ROOT;
    // Under Trireme's launcher, the launcher reports the first signal.
    let is_worker = group.world_size() > 1 || WorkerEnvironment::of_this_process()?.is_some();
    let interrupts = Interrupts::listen(is_root && error_log().is_none(), is_worker);
    let interrupts = interrupts.context("cannot install signal handlers")?;
    let mut console = Console::new(group.rank(), config.metrics(), &log_folder(config))?;
    let (task, language) = match process.custom_task {
        Some(own) => (Arc::clone(own), None),
        None => {
            let language = Arc::new(LanguageTask::open(config)?);
            (Arc::clone(&language) as Arc<dyn Task>, Some(language))
        }
    };
    let sample = Samples::open(&*task, config)?.train.sample();
    let workload = Workload::Task { task: &*task, sample: &sample };
    let job =
        PlannedRun { config, source: process.source, workload, workers: process.workers(config, &group) };
    let plan = common_plan(job, &group)?;
    plan.reasons.iter().for_each(|reason| console.notice(reason));
    let options = trainer_options(job, &plan, process, &group, &mut console)?;
    let refused = |error| with_alternatives(error, job, &plan);
    let mut trainer =
        Trainer::new(config, Arc::clone(&task), group, options, &mut console).map_err(refused)?;
    let saves = interrupts.forward_to(trainer.requests());
    let summary = trainer.run().map_err(refused)?;
    drop(saves);
    if let Some(stopped_by) = summary.stopped_by {
        // No rank may exit before rank 0 is here, as in `closing_report`.
        trainer.executor().group().barrier().wait()?;
        drop(trainer);
        console.finish();
        if is_root {
            stop_report(config, &summary).iter().for_each(|line| console.line(line));
        }
        let signal = match stopped_by {
            StoppedBy::Signal(signal) => signal,
            // As if the batch system had sent its usual signal.
            StoppedBy::TimeLimit => SIGUSR1,
        };
        return Err(LaunchError::Stopped { signal }.into());
    }
    let lines = closing_report(job, plan, language, trainer, &summary)?;
    console.finish();
    lines.iter().for_each(|line| console.line(line));
    Ok(())
}

/// Returns the options of this rank's trainer, and binds the process to its cores. Collective.
fn trainer_options(
    job: PlannedRun<'_>,
    plan: &Plan,
    process: ProcessContext<'_>,
    group: &Group,
    console: &mut Console,
) -> Result<TrainerOptions> {
    let (PlannedRun { config, source, .. }, ProcessContext { share, started, local_rank, simd_level, .. }) =
        (job, process);
    let predicts = config.metrics().predict_step_time;
    let step_seconds = if predicts { predicted_seconds(job, plan, group, console)? } else { None };
    // Measured before this process is bound to some of the host's cores.
    let cache = MachineCache::of_this_machine("peaks");
    let peak = worker_peak(config, share, simd_level, group, cache)?;
    peak.iter().for_each(|peak| console.log(&peak.note));
    share.bind().context("cannot bind this worker to its cores; set [launch] bind = \"none\"")?;
    if let Some(cpus) = share.bound_to() {
        console.log(&format!("note: this worker is bound to {cpus}"));
    }
    if config.launch().bind == Bind::Cores
        && let Some(why) = &share.why_unbound
    {
        console.notice(&format!("workers are not bound to cores: {why}"));
    }
    let is_root = group.rank() == Rank::ROOT;
    Ok(TrainerOptions {
        num_threads: local_threads(config, share.num_threads),
        local_rank,
        simd_level_max: Some(simd_level),
        peak_flops: peak.map(|peak| peak.flops),
        started,
        plan: Some(plan.worker_plan(step_seconds)),
        ends_at: if is_root { run_end(config, started, &|name| std::env::var(name).ok())? } else { None },
        given_config: if is_root { Some(source.original_toml(config)?) } else { None },
    })
}

/// Converts an error of a trainer. If a memory budget was exceeded, adds config changes that would fit.
fn with_alternatives(error: TrainError, job: PlannedRun<'_>, plan: &Plan) -> Error {
    match error.over_budget() {
        Some(OverBudget { budget, .. }) => {
            let now = plan.prediction.total().max(*budget);
            anyhow!("{error}\n{}", changes(job, now, Limit::Device))
        }
        None => error.into(),
    }
}

/// Returns rank 0's closing report: memory, loss, a sample and the next commands. Empty on other ranks. Collective.
fn closing_report(
    job: PlannedRun<'_>,
    plan: Plan,
    language: Option<Arc<LanguageTask>>,
    mut trainer: Trainer<'_>,
    summary: &RunSummary,
) -> Result<Vec<String>> {
    let config = job.config;
    // Once units have moved between stages, the plan from before the move no longer applies.
    let plan = match trainer.moved_after() {
        Some(_) => Plan::new(job, Some(trainer.choices().clone()))?,
        None => plan,
    };
    let memory = summary.seconds_to_first_step.map(|_| memory_table(&trainer, &plan)).transpose()?;
    let learns_answers = language.as_ref().is_some_and(|language| language.learns_answers());
    // A model that was trained on answers needs a prompt.
    let needs_prompt = learns_answers && config.generate().prompt.trim().is_empty();
    let weights = if config.generate().num_tokens > 0 && !needs_prompt {
        // Activations are no longer needed; the copy of the parameters takes their place.
        trainer.executor().device().trim();
        trainer.gather_parameters()
    } else {
        Ok(None)
    };
    let weights = match weights {
        Err(error) if error.comm().is_some() => return Err(error.into()),
        weights => weights.transpose(),
    };
    // No rank may exit before rank 0 is here: rank 0 would report it as a lost peer.
    let group = trainer.executor().group();
    group.barrier().wait()?;
    if group.rank() != Rank::ROOT {
        return Ok(Vec::new());
    }
    let mut lines: Vec<String> =
        memory.into_iter().chain(loss_summary(language.as_deref(), summary)?).collect();
    if let Some((language, weights)) = language.zip(weights) {
        let text = weights.map_err(Error::from);
        lines.push(match text.and_then(|weights| sample_text(config, &language, &trainer, weights)) {
            Ok(text) => format!("\n--- sample ---\n{text}\n--------------\n"),
            // The trained model is saved, so a sample can be generated at any time.
            Err(error) => format!("\ncannot generate a sample: {error:#}\n"),
        });
    }
    lines.extend(files_and_next_steps(config, summary, learns_answers));
    Ok(lines)
}

/// Predicts the seconds of a step and reports them. `None` on ranks other than 0, and with several hosts. Collective.
fn predicted_seconds(
    job: PlannedRun<'_>,
    plan: &Plan,
    group: &Group,
    console: &mut Console,
) -> Result<Option<f64>> {
    if group.hosts().num_hosts() > 1 {
        console.notice("step times are only predicted for workers on one host");
        return Ok(None);
    }
    let found = plan.step_time(job, group.split_by("measured", |_| 0)?);
    let found = found.context("cannot predict the time of a step; set metrics.predict_step_time = false")?;
    let Some(PredictedTime { time, unmeasured }) = found else { return Ok(None) };
    console.notice(&format!("predicted step time: {:.4} s", time.seconds));
    if !unmeasured.is_empty() {
        console.notice(&format!(
            "the predicted step time lacks what was not measured: {}",
            unmeasured.join(", ")
        ));
    }
    Ok(Some(time.seconds))
}

/// Returns a plan that fits all workers. All ranks use the choices of rank 0. Collective.
fn common_plan(job: PlannedRun<'_>, group: &Group) -> Result<Plan> {
    let fitting = |chosen: Option<StepChoices>| {
        let plan = Plan::new(job, chosen)?;
        plan.check(job)?;
        anyhow::Ok(plan)
    };
    let config = job.config;
    let open = open_choices(config);
    let has_file = config.parallelism().pipeline_parallel_schedule_file.is_some();
    // Ranks of the tensor axis may hold vocabulary shards of unequal cost. If each rank balanced the stages by its own costs, the splits
    // could differ.
    let has_tensor_axis = config.parallelism().tensor_parallel_degree > 1;
    if !open.may_choose_keeps && open.offloadable.is_empty() && !has_file && !has_tensor_axis {
        return fitting(None);
    }
    let is_root = group.rank() == Rank::ROOT;
    // Hosts may differ in memory and files, but workers must make the same choices.
    let own = if is_root { Some(fitting(None)?) } else { None };
    let chosen = StepChoices::broadcast_from_root(own.as_ref().map(|plan| &plan.choices), group)?;
    match (own, chosen) {
        (Some(plan), _) => Ok(plan),
        (None, Some(chosen)) => fitting(Some(chosen)),
        (None, None) => {
            bail!("worker 0 runs a different version of trireme; use the same version on all workers")
        }
    }
}
