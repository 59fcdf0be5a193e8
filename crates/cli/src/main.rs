//! The `trireme` command line.

mod bounded;
mod commands;
mod console;
mod hang;
mod launch;
mod memory_limit;
mod planning;
mod simd;
mod started;
mod statistics;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

const EXAMPLES: &str = r#"A first run needs nothing but a config:

    trireme train configs/quickstart.toml

To train on a text of your own:

    trireme prepare book.txt --out corpus
    trireme train configs/quickstart.toml --set run.name=book \
        --set 'data.inputs=[]' --set data.folder=corpus
    trireme generate runs/book --prompt "Once"
"#;

/// Distributed deep-learning training: one binary, one config file.
#[derive(Debug, Parser)]
#[command(version, after_help = EXAMPLES)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Train(commands::train::TrainArgs),
    Prepare(commands::prepare::PrepareArgs),
    Generate(commands::generate::GenerateArgs),
    Checkpoint(commands::checkpoint::CheckpointArgs),
    Config(commands::config::ConfigArgs),
    Plan(commands::plan::PlanArgs),
    Report(commands::report::ReportArgs),
    Doctor(commands::doctor::DoctorArgs),
    Bench(commands::bench::BenchArgs),
    FlightRecorder(commands::flight_recorder::FlightRecorderArgs),
    #[command(hide = true)]
    ProveKernels(commands::prove_kernels::ProveKernelsArgs),
}

fn main() -> ExitCode {
    let started = started::command_started();
    let result =
        launch::die_with_parent().map_err(Into::into).and_then(|()| match Arguments::parse().command {
            Command::Train(args) => commands::train::run(&args, started),
            Command::Prepare(args) => commands::prepare::run(&args),
            Command::Generate(args) => commands::generate::run(&args),
            Command::Checkpoint(args) => commands::checkpoint::run(&args),
            Command::Config(args) => commands::config::run(&args),
            Command::Plan(args) => commands::plan::run(&args),
            Command::Report(args) => commands::report::run(&args),
            Command::Doctor(args) => commands::doctor::run(&args),
            Command::Bench(args) => commands::bench::run(&args, started),
            Command::FlightRecorder(args) => commands::flight_recorder::run(&args),
            Command::ProveKernels(args) => commands::prove_kernels::run(&args),
        });
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => ExitCode::from(console::report_error(&error)),
    }
}
