//! `trireme bench`.

mod kernels;
mod step;

use anyhow::Result;
use std::time::{Duration, Instant};

/// Measure this machine and this build.
#[derive(Debug, clap::Args)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    command: BenchCommand,
}

#[derive(Debug, clap::Subcommand)]
enum BenchCommand {
    Kernels(kernels::KernelsArgs),
    Step(step::StepArgs),
}

/// Runs `trireme bench`.
pub(crate) fn run(args: &BenchArgs, started: Instant) -> Result<()> {
    match &args.command {
        BenchCommand::Kernels(args) => kernels::run(args),
        BenchCommand::Step(args) => step::run(args, started),
    }
}

/// Reads how long to measure a figure.
pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| (0.0..=3600.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or_else(|| "expected seconds from 0 to 3600".to_owned())
}
