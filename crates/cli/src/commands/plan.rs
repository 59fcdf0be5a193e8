//! `trireme plan`.

use crate::console::{Output, columns};
use crate::memory_limit::MemoryLimit;
use crate::planning::{Drawing, Plan, Source, Workers, advice, vocabulary_size};
use crate::simd::{Proof, Simd};
use anyhow::{Context, Result, bail};
use std::io::Write;
use std::path::{Path, PathBuf};
use trireme_base::Bytes;
use trireme_planner::table;
use trireme_train::config::Config;

const EXAMPLES: &str = "\
Examples:
  trireme plan configs/quickstart.toml
      What each of the config's workers takes at most.
  trireme plan my.toml --workers 4 --set parallelism.zero_stage=3
      The same for four workers that share out the whole training state.
  trireme plan my.toml --set memory.device_budget=512MiB --set activation_checkpoint.mode=auto
      The least recomputation that fits into 512 MiB; fails, and says what would fit, if nothing does.
  trireme plan my.toml --set memory.device_budget=512MiB --set offload.activations=auto
      What has to leave the device so that a step fits, if anything, where it goes and when.
  trireme plan my.toml --workers 4 --set parallelism.pipeline_parallel_degree=4 --draw
      The stages of a pipeline of four workers, and the order in which they run, to scale.
  trireme plan my.toml --workers 4 --set parallelism.pipeline_parallel_degree=4 --save-schedule order.txt
      The same order as text, to change it: train with --set parallelism.pipeline_parallel_schedule_file=order.txt.

Nothing is trained, and nothing written but what is asked for; memory for the model is not needed. docs/memory.md says what is counted.";

/// Predict the memory that a run's workers take.
///
/// Goes through the step program of a config, line by line, and prints what each category of memory takes at most, all of
/// them together, and at which line that is. Workers are those that `trireme train` would start on this host; told is the one that
/// takes most. Of a pipeline it also says what each rank runs and how much of its time is lost.
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct PlanArgs {
    /// The config file.
    config: PathBuf,
    /// Number of local workers; as `--set launch.workers=N`.
    #[arg(long, value_name = "N")]
    workers: Option<usize>,
    /// Set a key over what the file says; the value is TOML or a bare string.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    overrides: Vec<String>,
    /// Also print the step program.
    #[arg(long)]
    program: bool,
    /// Also draw the step: a grid of pipeline ranks and time, bubbles dotted.
    #[arg(long)]
    draw: bool,
    /// Write the drawing to a file as SVG.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Write the order of passes to a file, which `[parallelism] pipeline_parallel_schedule_file` reads.
    #[arg(long, value_name = "FILE")]
    save_schedule: Option<PathBuf>,
}

/// Runs `trireme plan`.
pub(crate) fn run(args: &PlanArgs) -> Result<()> {
    let mut overrides = args.overrides.clone();
    overrides.extend(args.workers.map(|workers| format!("launch.workers={workers}")));
    let source = Source { path: &args.config, overrides: &overrides, world_size: None };
    let config = Config::load(source.path, source.overrides, None)?;
    let limit = MemoryLimit::of_this_process();
    let simd = Simd::choose(Proof::Cached)?;
    simd.warn();
    let workers = Workers::local(&config, &limit, simd.level);
    let vocabulary_size = vocabulary_size(&config)?;
    let plan = Plan::largest(&config, vocabulary_size, workers)?;
    let drawing = Drawing::new(&config, &plan)?;
    if args.save_schedule.is_some() {
        refuse_to_save(&config)?;
    }
    let mut text = String::new();
    if args.program {
        text += &format!("{}\n", plan.program);
    }
    let millions = plan.model.table().num_elements() as f64 / 1e6;
    text += &format!("{millions:.2} M parameters; {workers}\n\n");
    if config.parallelism().pipeline_parallel_degree > 1 {
        text += &format!("{}\nof rank {}, which takes most:\n", drawing.summary(&config), plan.rank);
    }
    let total = plan.prediction.total();
    text += &table(&[("predicted", plan.prediction.peaks, total)]);
    text += &format!("\nall together are at their peak {}\n", plan.prediction.moment(&plan.program));
    if plan.prediction.host > 0 {
        let host = Bytes(plan.prediction.host as u64);
        text += &format!(
            "beside that, state that does not live on the device takes {host} of the host's memory\n"
        );
    }
    text.extend(plan.reasons.iter().map(|reason| format!("{reason}\n")));
    if args.draw {
        text += &format!("\n{}", drawing.text(columns()));
    }
    let title = format!("{}: a step of {workers}", args.config.display());
    save(args.svg.as_deref(), || drawing.svg(&title))?;
    save(args.save_schedule.as_deref(), || drawing.schedule_text())?;
    Output.write_all(text.as_bytes())?;
    if let Some(limit) = plan.passed() {
        bail!(advice(source, &config, (&plan, limit), vocabulary_size, workers));
    }
    Ok(())
}

/// What cannot be read again as a schedule of one's own.
fn refuse_to_save(config: &Config) -> Result<()> {
    if config.parallelism().pipeline_parallel_degree == 1 {
        bail!("--save-schedule writes the order of a pipeline; set parallelism.pipeline_parallel_degree");
    }
    if config.is_asynchronous() {
        bail!(
            "--save-schedule writes what pipeline_parallel_schedule_file reads, and that is for schedules that drain between steps"
        );
    }
    Ok(())
}

/// Writes what was asked for, if it was.
fn save(path: Option<&Path>, text: impl FnOnce() -> String) -> Result<()> {
    let Some(path) = path else { return Ok(()) };
    std::fs::write(path, text()).with_context(|| format!("cannot write {}", path.display()))
}
