//! `trireme bench`.

mod step;

use anyhow::Result;
use std::time::Instant;

/// Measure this machine and this build.
#[derive(Debug, clap::Args)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    command: BenchCommand,
}

#[derive(Debug, clap::Subcommand)]
enum BenchCommand {
    Step(step::StepArgs),
}

/// Runs `trireme bench`.
pub(crate) fn run(args: &BenchArgs, started: Instant) -> Result<()> {
    match &args.command {
        BenchCommand::Step(args) => step::run(args, started),
    }
}
