//! `trireme plan`.

use crate::console::Output;
use crate::planning::{Plan, Source, Workers, advice, vocabulary_size};
use anyhow::{Result, bail};
use std::io::Write;
use std::path::PathBuf;
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

Nothing is trained or written, and memory for the model is not needed. docs/memory.md says what is counted.";

/// Predict the memory that a run's workers take.
///
/// Goes through the step program of a config, line by line, and prints what each category of memory takes at most, all of
/// them together, and at which line that is. Workers are those that `trireme train` would start on this host; the first one
/// takes most.
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
}

/// Runs `trireme plan`.
pub(crate) fn run(args: &PlanArgs) -> Result<()> {
    let mut overrides = args.overrides.clone();
    overrides.extend(args.workers.map(|workers| format!("launch.workers={workers}")));
    let source = Source { path: &args.config, overrides: &overrides, world_size: None };
    let config = Config::load(source.path, source.overrides, None)?;
    let (workers, vocabulary_size) = (Workers::local(&config), vocabulary_size(&config)?);
    let plan = Plan::new(&config, vocabulary_size, workers, None)?;
    let mut text = String::new();
    if args.program {
        text += &format!("{}\n", plan.program);
    }
    let millions = plan.model.table().num_elements() as f64 / 1e6;
    text += &format!("{millions:.2} M parameters; {workers}\n\n");
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
    Output.write_all(text.as_bytes())?;
    if !plan.fits() {
        bail!(advice(source, &config, &plan, vocabulary_size, workers));
    }
    Ok(())
}
