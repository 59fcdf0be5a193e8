//! `trireme plan`.

use super::init::DEFAULT_CONFIG;
use super::train::world_options;
use super::{check_config_path, write_file};
use crate::console::{Output, columns, parameters};
use crate::host::SharedLimit;
use crate::launch::{WorkerEnvironment, launch_workers, recorder_folder, work_in_world};
use crate::planning::{
    ConfigSource, Plan, PlannedRun, PlannedSchedule, PredictedTime, Workers, Workload, language_model,
    sequences_of,
};
use crate::simd::{Simd, Verification};
use anyhow::{Result, bail};
use serde_json::json;
use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;
use trireme_base::Bytes;
use trireme_comm::{Group, single};
use trireme_planner::{StepTime, format_memory_table, peak_location};
use trireme_schedule::pipeline::{draw_svg, draw_text};
use trireme_train::config::TaskKind;
use trireme_train::{Samples, Task};

const EXAMPLES: &str = "\
Examples:
  trireme plan configs/quickstart.toml
      The peak memory of the config's workers.
  trireme plan my.toml --workers 4 --set parallelism.zero_stage=3
      The same for four workers that shard all training state.
  trireme plan my.toml --workers 64 --workers-per-host 8 --json
      The same for 64 workers on eight hosts, as JSON: memory, floating-point operations and exchanges.
  trireme plan my.toml --time
      How long a step takes on this machine, too.
  trireme plan my.toml --set memory.device_budget=512MiB --set activation_checkpoint.mode=auto
      The least recomputation that fits into 512 MiB. If nothing fits, fails and suggests changes.
  trireme plan my.toml --set memory.device_budget=512MiB --set offload.activations=auto
      Which activations must leave the device so that a step fits, where they go and when.
  trireme plan my.toml --workers 4 --set parallelism.pipeline_parallel_degree=4 --draw
      The stages of a pipeline of four workers, and the order in which they run, to scale.
  trireme plan my.toml --workers 4 --set parallelism.pipeline_parallel_degree=4 --save-schedule order.txt
      The same order as text that you can edit; train with --set parallelism.pipeline_parallel_schedule_file=order.txt.

The command trains nothing, writes only the files that you ask for, and does not need the memory of the model. With --time, it
also starts the workers and measures for a few seconds. docs/memory.md explains what is counted, docs/time.md what is measured.";

/// Predict the memory use of a run's workers, and the time of a step.
///
/// Walks through the actions of a step (its program) without computing anything. Prints the peak of each memory category, the peak of their
/// total, and the action at which it is reached, for the worker that needs the most. The workers are those that `trireme train` would start
/// on this host. `--set memory.device_budget=512MiB` bounds a worker, and shows what would fit. For a pipeline, also prints what each rank
/// runs and how much of its time is idle.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct PlanArgs {
    /// Config file.
    #[arg(default_value = DEFAULT_CONFIG)]
    config: PathBuf,
    /// Number of local workers; same as `--set launch.workers=N`.
    #[arg(long, value_name = "N")]
    workers: Option<usize>,
    /// Override a key of the file; the value is TOML or a bare string.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    overrides: Vec<String>,
    /// Also predict the time of a step on this machine. Starts the workers, which measure kernels and communication in
    /// isolation for a few seconds.
    #[arg(long)]
    time: bool,
    /// Plan for several hosts with N workers each. By default, all workers are on one host.
    #[arg(long, value_name = "N", conflicts_with = "time", value_parser = clap::value_parser!(u16).range(1..))]
    workers_per_host: Option<u16>,
    /// Print one line of JSON instead: memory, operations and exchanges of the worker that needs the most memory, and `fits`,
    /// which is false where the plan would fail (docs/memory.md). With --time, also `step_seconds`, `samples_per_second`, and as
    /// `unmeasured` the kernels and operations that the prediction lacks.
    #[arg(long, conflicts_with_all = ["program", "draw", "svg", "save_schedule"])]
    json: bool,
    /// Also print the step program.
    #[arg(long)]
    program: bool,
    /// Also draw the step: a grid of pipeline ranks and time, with dots for bubbles.
    #[arg(long)]
    draw: bool,
    /// Write the drawing to an SVG file.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Write the order of passes to a file that `[parallelism] pipeline_parallel_schedule_file` can read.
    #[arg(long, value_name = "FILE")]
    save_schedule: Option<PathBuf>,
}

pub(crate) fn run(args: &PlanArgs, custom_task: Option<&dyn Task>, started: Instant) -> Result<()> {
    check_config_path(&args.config)?;
    let mut overrides = args.overrides.clone();
    overrides.extend(args.workers.map(|workers| format!("launch.workers={workers}")));
    let task_kind = if custom_task.is_some() { TaskKind::CustomTask } else { TaskKind::LanguageModel };
    // With --time, a process may be a worker.
    let environment = if args.time { WorkerEnvironment::of_this_process()? } else { None };
    let world_size = environment.as_ref().map(|environment| environment.world_size);
    let source = ConfigSource { path: &args.config, overrides: &overrides, world_size, task_kind };
    let config = source.load(&[])?;
    let limits = SharedLimit::all(config.memory().huge_pages);
    let simd = Simd::choose(Verification::Cached)?;
    if environment.is_none() {
        simd.warn();
    }
    let mut workers = Workers::local(&config, &limits, simd.level);
    if let Some(per_host) = args.workers_per_host.map(usize::from) {
        if !config.world_size().is_multiple_of(per_host) {
            bail!(
                "--workers-per-host {per_host} does not divide the {} workers; choose a divisor",
                config.world_size()
            );
        }
        workers = workers.on_hosts(&config, per_host);
    }
    let (sample, model);
    let workload = match custom_task {
        Some(task) => {
            sample = Samples::open(task, &config)?.train.sample();
            Workload::Task { task, sample: &sample }
        }
        None => {
            model = language_model(&config)?;
            Workload::Language { model: &model, sequences: sequences_of(&config) }
        }
    };
    show_all(args, PlannedRun { config: &config, source, workload, workers }, environment, &simd, started)
}

/// Shows the plan and, with `--time`, the step time. The process that the user started shows the plan and starts the workers. The workers
/// measure, and rank 0 prints the step time.
fn show_all(
    args: &PlanArgs,
    job: PlannedRun<'_>,
    environment: Option<WorkerEnvironment>,
    simd: &Simd,
    started: Instant,
) -> Result<()> {
    let config = job.config;
    let plan = Plan::largest(job)?;
    if let Some(environment) = environment {
        let options = world_options(config, &environment)?;
        return work_in_world(options, recorder_folder(), |world| show_time(args, job, &plan, world));
    }
    if !args.json {
        show(args, job, &plan)?;
    } else if !args.time {
        return Ok(writeln!(Output, "{}", serde_json::to_string(&plan.report(job)?)?)?);
    }
    plan.check(job)?;
    match config.world_size() {
        _ if !args.time => Ok(()),
        1 => show_time(args, job, &plan, single()),
        num_workers => launch_workers(num_workers, started, Some(simd)),
    }
}

fn show_time(args: &PlanArgs, job: PlannedRun<'_>, plan: &Plan, world: Group) -> Result<()> {
    if world.hosts().num_hosts() > 1 {
        bail!("--time needs all workers on one host; start the command without a launcher");
    }
    let Some(PredictedTime { time, unmeasured }) = plan.step_time(job, world)? else { return Ok(()) };
    let StepTime { seconds, compute_seconds: computing } = time;
    let samples_per_second = job.config.training().global_batch_size as f64 / seconds;
    if args.json {
        let mut report = json!(plan.report(job)?);
        report["step_seconds"] = json!(seconds);
        report["samples_per_second"] = json!(samples_per_second);
        report["unmeasured"] = json!(unmeasured);
        return Ok(writeln!(Output, "{report}")?);
    }
    let busiest = computing.iter().copied().fold(0.0, f64::max);
    writeln!(
        Output,
        "\npredicted step time: {seconds:.4} s, {samples_per_second:.1} samples/s; the busiest worker computes for \
         {busiest:.4} s of it"
    )?;
    if !unmeasured.is_empty() {
        writeln!(Output, "not measured, and counted as no time: {}", unmeasured.join(", "))?;
    }
    Ok(())
}

fn show(args: &PlanArgs, job: PlannedRun<'_>, plan: &Plan) -> Result<()> {
    let PlannedRun { config, workers, .. } = job;
    let drawing = PlannedSchedule::new(config, plan)?;
    let has_pipeline = config.parallelism().pipeline_parallel_degree > 1;
    // A schedule of one stage could not be read back from a schedule file.
    if args.save_schedule.is_some() && !has_pipeline {
        bail!("--save-schedule needs a pipeline; set parallelism.pipeline_parallel_degree");
    }
    let mut text = String::new();
    if args.program {
        text += &format!("{}\n", plan.program);
    }
    text += &format!("{}; {workers}\n\n", parameters(plan.model.table().full().num_elements()));
    if has_pipeline {
        text += &format!("{}\nrank {}, which needs the most memory:\n", drawing.summary(config), plan.rank);
    }
    let mesh = config.degrees().mesh(config.world_size());
    if mesh.axes().iter().filter(|(_, degree)| *degree > 1).count() > 1 {
        text += &format!("ranks by their places on the axes:\n{mesh}\n");
    }
    let total = plan.prediction.total();
    text += &format_memory_table(&[("predicted", plan.prediction.peaks, total)]);
    text += &format!("\npeak total: {}\n", peak_location(&plan.prediction, &plan.program));
    if plan.prediction.host > 0 {
        let host = Bytes(plan.prediction.host as u64);
        text += &format!("in addition, state outside the device takes {host} of host memory\n");
    }
    text.extend(plan.reasons.iter().map(|reason| format!("{reason}\n")));
    if args.draw {
        text += &format!("\n{}", draw_text(&drawing.schedule, &drawing.timeline, columns()));
    }
    if let Some(path) = &args.svg {
        let title = format!("{}: a step of {workers}", args.config.display());
        write_file(path, &draw_svg(&drawing.schedule, &drawing.timeline, &title))?;
    }
    if let Some(path) = &args.save_schedule {
        write_file(path, &drawing.schedule.to_string())?;
    }
    Ok(Output.write_all(text.as_bytes())?)
}
