//! `trireme bench`.

mod collectives;
mod disk;
mod kernels;
mod layouts;
mod schedule;
mod step;

use crate::launch::{LaunchError, LocalWorld, run_local_workers, worker_command};
use crate::simd::Simd;
use anyhow::{Context, Result};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use trireme_train::FLIGHT_RECORDER_FOLDER;

/// Tells a worker where to write the reports of its flight recorder.
const RECORDER_VARIABLE: &str = "TRIREME_FLIGHT_RECORDER";

/// Measure the speed of this machine and this build.
#[derive(Debug, clap::Args)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    command: BenchCommand,
}

#[derive(Debug, clap::Subcommand)]
enum BenchCommand {
    Collectives(collectives::CollectivesArgs),
    Disk(disk::DiskArgs),
    Kernels(kernels::KernelsArgs),
    Layouts(layouts::LayoutsArgs),
    Schedule(schedule::ScheduleArgs),
    Step(step::StepArgs),
}

/// Runs `trireme bench`.
pub(crate) fn run(args: &BenchArgs, started: Instant) -> Result<()> {
    match &args.command {
        BenchCommand::Collectives(args) => collectives::run(args, started),
        BenchCommand::Disk(args) => disk::run(args),
        BenchCommand::Kernels(args) => kernels::run(args),
        BenchCommand::Layouts(args) => layouts::run(args),
        BenchCommand::Schedule(args) => schedule::run(args),
        BenchCommand::Step(args) => step::run(args, started),
    }
}

/// Reads how long to measure a figure.
pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.0..=3600.0).contains(seconds));
    seconds
        .map(Duration::from_secs_f64)
        .ok_or_else(|| "expected a number of seconds from 0 to 3600".to_owned())
}

/// Starts this command again for each worker, and waits until all have exited. If one dies, its log and the flight
/// recorders' reports stay in a folder like that of a run. `simd` is what the workers' kernels use, if they have any.
pub(super) fn launch_workers(num_workers: usize, started: Instant, simd: Option<&Simd>) -> Result<()> {
    let folder = std::env::temp_dir().join(format!("trireme-bench-{}", std::process::id()));
    std::fs::create_dir_all(&folder)
        .with_context(|| format!("cannot create the folder {}", folder.display()))?;
    let recorder_folder = folder.join(FLIGHT_RECORDER_FOLDER);
    let world =
        LocalWorld { num_workers, master_port: 0, log_folder: &folder, recorder_folder: &recorder_folder };
    let command = worker_command(started, simd)?;
    let ended = run_local_workers(world, |_| {
        let mut worker = command();
        worker.env(RECORDER_VARIABLE, &recorder_folder);
        worker
    });
    // Of a worker's death the error names the log; else nobody will look for it.
    if !matches!(ended, Err(LaunchError::WorkerDied { .. })) {
        // What cannot be removed from the temporary folder is the system's to remove.
        let _ = std::fs::remove_dir_all(&folder);
    }
    Ok(ended?)
}

/// Where this worker writes the reports of its flight recorder, if a launcher of ours has said so.
pub(super) fn recorder_folder() -> Option<PathBuf> {
    std::env::var_os(RECORDER_VARIABLE).map(PathBuf::from)
}
