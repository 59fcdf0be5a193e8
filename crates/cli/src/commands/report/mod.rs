//! `trireme report`.

mod comparison;
mod picture;
mod trace;

use anyhow::Result;

/// Show what a run did.
#[derive(Debug, clap::Args)]
pub(crate) struct ReportArgs {
    #[command(subcommand)]
    command: ReportCommand,
}

#[derive(Debug, clap::Subcommand)]
enum ReportCommand {
    Trace(trace::TraceArgs),
}

/// Runs `trireme report`.
pub(crate) fn run(args: &ReportArgs) -> Result<()> {
    match &args.command {
        ReportCommand::Trace(args) => trace::run(args),
    }
}
