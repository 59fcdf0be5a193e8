//! `trireme bench layouts`.

use crate::commands::read_file;
use crate::console::{MeasurementStatus, Output};
use crate::statistics::median;
use crate::temporary::temporary_folder;
use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use trireme_base::with_resource_limits;
use trireme_train::config::Config;
use trireme_train::metrics::METRICS_FILE;

const HELP: &str = "\
Each layout is trained for some steps, as `trireme train` does. Its workers first
measure kernels and communication in isolation, and predict the time of a step from
these figures and a dry run (`trireme plan --time`). The measured time is the median
of the steps after the third. Both times, and their ratio, are medians over the rounds:
a prediction is compared with the run that follows it at once, because machines change
their speed.

The config's global batch size is the same for every layout. For the list of layouts it
must be divisible by four times the local batch size.

Examples:
  trireme bench layouts my.toml
      All layouts of one, two and four workers.
  trireme bench layouts my.toml --layout 'launch.workers=2 parallelism.zero_stage=3'
      One layout of your own; may be repeated.";

/// Overrides of the config for each layout.
const LAYOUTS: [&str; 27] = [
    "launch.workers=1",
    "launch.workers=1 activation_checkpoint.mode=selective",
    "launch.workers=1 activation_checkpoint.mode=block",
    "launch.workers=1 offload.activations=host",
    "launch.workers=1 parallelism.zero_stage=1 offload.optimizer=disk",
    "launch.workers=2",
    "launch.workers=2 parallelism.zero_stage=1",
    "launch.workers=2 parallelism.zero_stage=2",
    "launch.workers=2 parallelism.zero_stage=3",
    "launch.workers=2 parallelism.zero_stage=3 activation_checkpoint.mode=block",
    "launch.workers=2 parallelism.shard_gradients=true",
    "launch.workers=2 parallelism.pipeline_parallel_degree=2",
    "launch.workers=2 parallelism.pipeline_parallel_degree=2 parallelism.pipeline_parallel_schedule=zb-h1",
    "launch.workers=4",
    "launch.workers=4 parallelism.zero_stage=2",
    "launch.workers=4 parallelism.zero_stage=3",
    "launch.workers=4 parallelism.pipeline_parallel_degree=2 parallelism.zero_stage=1",
    "launch.workers=4 parallelism.pipeline_parallel_degree=4",
    "launch.workers=2 parallelism.tensor_parallel_degree=2",
    "launch.workers=2 parallelism.tensor_parallel_degree=2 parallelism.sequence_parallel=false",
    "launch.workers=4 parallelism.tensor_parallel_degree=2",
    "launch.workers=4 parallelism.tensor_parallel_degree=2 parallelism.zero_stage=2",
    "launch.workers=4 parallelism.tensor_parallel_degree=2 parallelism.pipeline_parallel_degree=2",
    "launch.workers=2 parallelism.context_parallel_degree=2 parallelism.context_parallel_heads_degree=1",
    "launch.workers=2 parallelism.context_parallel_degree=2 parallelism.context_parallel_heads_degree=2",
    "launch.workers=4 parallelism.context_parallel_degree=2",
    "launch.workers=4 parallelism.context_parallel_degree=2 parallelism.tensor_parallel_degree=2",
];

/// Compare predicted and measured step times of several layouts on this machine.
#[derive(Debug, clap::Args)]
#[command(after_help = HELP)]
pub(crate) struct LayoutsArgs {
    /// Config file.
    config: PathBuf,
    /// Overrides that make a layout, separated by spaces. May be repeated. By default, a list of layouts of one, two and
    /// four workers.
    #[arg(long = "layout", value_name = "KEY=VALUE …")]
    layouts: Vec<String>,
    /// Override a key of the file for all layouts; the value is TOML or a bare string.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    overrides: Vec<String>,
    /// Steps of each run.
    #[arg(long, value_name = "N", default_value_t = 12, value_parser = clap::value_parser!(u64).range(4..))]
    steps: u64,
    /// Rounds, in each of which every layout runs once.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
    rounds: u64,
    /// Print one line of JSON for each layout.
    #[arg(long)]
    json: bool,
}

/// A layout with its median step times in seconds.
#[derive(Debug, Serialize)]
struct LayoutComparison<'a> {
    layout: &'a str,
    predicted_step_seconds: f64,
    measured_step_seconds: f64,
    /// Median over the rounds of the predicted time divided by the measured time.
    ratio: f64,
}

/// The fields of a line of `metrics.jsonl` that are read.
#[derive(Deserialize)]
struct Step {
    step_seconds: f64,
    step_seconds_predicted: Option<f64>,
}

pub(super) fn run(args: &LayoutsArgs) -> Result<()> {
    let layouts: Vec<&str> = match &args.layouts[..] {
        [] => LAYOUTS.to_vec(),
        own => own.iter().map(String::as_str).collect(),
    };
    let folder = temporary_folder("trireme-layouts-")?;
    let runs = &folder.path().join("runs");
    let measuring = MeasurementStatus::new();
    // All layouts are checked before the first run: a mistake in the last one must not cost the time of the others.
    for layout in &layouts {
        Config::load(&args.config, &overrides(args, layout, runs), None)
            .with_context(|| format!("layout '{layout}'"))?;
    }
    let mut found: Vec<[Vec<f64>; 2]> = vec![Default::default(); layouts.len()];
    for round in 1..=args.rounds {
        for (layout, found) in layouts.iter().zip(&mut found) {
            measuring.show(&format!("{layout} (round {round} of {})", args.rounds));
            let times = train(args, layout, runs)?;
            found.iter_mut().zip(times).for_each(|(found, time)| found.push(time));
        }
    }
    drop(measuring);
    let compared = layouts.iter().zip(found).map(|(layout, times)| {
        let ratio = median(times[0].iter().zip(&times[1]).map(|(predicted, measured)| predicted / measured));
        let [predicted_step_seconds, measured_step_seconds] = times.map(median);
        LayoutComparison { layout, predicted_step_seconds, measured_step_seconds, ratio }
    });
    let compared: Vec<LayoutComparison<'_>> = compared.collect();
    if args.json {
        for layout in &compared {
            writeln!(Output, "{}", serde_json::to_string(layout)?)?;
        }
        return Ok(());
    }
    writeln!(Output, "predicted  measured  ratio  layout")?;
    for LayoutComparison { layout, predicted_step_seconds, measured_step_seconds, ratio } in &compared {
        writeln!(Output, "{predicted_step_seconds:8.4}s {measured_step_seconds:8.4}s {ratio:6.3}  {layout}")?;
    }
    let near = compared.iter().filter(|layout| (layout.ratio - 1.0).abs() <= 0.1).count();
    Ok(writeln!(Output, "{near} of {} within 10 %", compared.len())?)
}

/// Returns the overrides in the order in which they apply: `--set`, the layout, the overrides that all runs share.
fn overrides(args: &LayoutsArgs, layout: &str, runs: &Path) -> Vec<String> {
    let common = [
        format!("run.folder={}", runs.display()),
        "run.name=run".to_owned(),
        format!("training.steps={}", args.steps),
        "training.validation_interval=0".to_owned(),
        "checkpoint.enable=false".to_owned(),
        "generate.num_tokens=0".to_owned(),
        "metrics.predict_step_time=true".to_owned(),
        "metrics.jsonl=true".to_owned(),
    ];
    let layout = layout.split_whitespace().map(str::to_owned);
    args.overrides.iter().cloned().chain(layout).chain(common).collect()
}

/// Trains a layout for some steps. Returns the predicted and the measured seconds of a step.
fn train(args: &LayoutsArgs, layout: &str, runs: &Path) -> Result<[f64; 2]> {
    let program = std::env::current_exe().context("cannot find this program")?;
    let mut command = Command::new(program);
    command.arg("train").arg(&args.config);
    for change in overrides(args, layout, runs) {
        command.args(["--set", &change]);
    }
    let output = command
        .output()
        .map_err(with_resource_limits)
        .with_context(|| format!("cannot start {command:?}"))?;
    if !output.status.success() {
        let error = String::from_utf8_lossy(&output.stderr);
        bail!("{layout}: the run failed: {}", error.trim_end().trim_start_matches("error: "));
    }
    let times = read_times(&runs.join("run").join(METRICS_FILE)).with_context(|| layout.to_owned())?;
    std::fs::remove_dir_all(runs).with_context(|| format!("cannot remove {}", runs.display()))?;
    Ok(times)
}

fn read_times(path: &Path) -> Result<[f64; 2]> {
    let text = read_file(path)?;
    let steps: Vec<Step> = text.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let predicted = steps.first().and_then(|step| step.step_seconds_predicted);
    let predicted = predicted.context("the run has predicted no step time")?;
    if steps.len() <= 3 {
        bail!("{} has only {} steps", path.display(), steps.len());
    }
    Ok([predicted, median(steps[3..].iter().map(|step| step.step_seconds))])
}
