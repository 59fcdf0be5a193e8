//! `trireme bench`.

mod collectives;
mod devices;
mod disk;
mod kernels;
mod layouts;
mod schedule;
mod step;

use anyhow::Result;
use std::time::{Duration, Instant};

#[derive(Debug, clap::Subcommand)]
pub(crate) enum BenchCommand {
    Collectives(collectives::CollectivesArgs),
    Disk(disk::DiskArgs),
    Kernels(kernels::KernelsArgs),
    Layouts(layouts::LayoutsArgs),
    Schedule(schedule::ScheduleArgs),
    Step(step::StepArgs),
}

pub(crate) fn run(command: &BenchCommand, started: Instant) -> Result<()> {
    match command {
        BenchCommand::Collectives(args) => collectives::run(args, started),
        BenchCommand::Disk(args) => disk::run(args),
        BenchCommand::Kernels(args) => kernels::run(args),
        BenchCommand::Layouts(args) => layouts::run(args),
        BenchCommand::Schedule(args) => schedule::run(args),
        BenchCommand::Step(args) => step::run(args, started),
    }
}

/// Parses the time for which a figure is measured, in seconds.
pub(crate) fn seconds(text: &str) -> Result<Duration, &'static str> {
    let seconds = text.parse().ok().filter(|seconds| (0.0..=3600.0).contains(seconds));
    seconds.map(Duration::from_secs_f64).ok_or("expected a number of seconds from 0 to 3600")
}
