//! Distributed deep-learning training: the `trireme` command, and the library for programs that train a model of their own.
//!
//! A program describes what it trains as a [`Task`], and passes it to [`run`]. The program then has the commands `train CONFIG`, `plan
//! CONFIG` and `report`. It starts its workers, shards and overlaps as the config says, writes checkpoints and resumes from them, and
//! reports the cause of a hang.
//!
//! - A [`Model`](model::Model) is a chain of [units](model::Unit), which apply [operations](tape) to named tensors.
//! - A [`Dataset`] writes the sample of any index into the tensors of a batch.
//! - An [`Operation`](tape::Operation) of your own is a type that implements forward and backward.
//!
//! `examples/residual_network` has all three.

mod argument_hints;
mod clock;
mod commands;
mod console;
mod diagnostics;
mod hang;
mod hints;
mod host;
mod interrupts;
mod launch;
mod log_line;
mod machine_cache;
mod numbers;
mod open_files;
mod peak;
mod planning;
mod process_state;
mod simd;
mod started;
mod statistics;
mod temporary;
mod timeout;

pub use trireme_base as base;
pub use trireme_checkpoint as checkpoint;
pub use trireme_data::Shuffle;
pub use trireme_model as model;
pub use trireme_tensor as tensor;
pub use trireme_tensor::tape;
pub use trireme_train as train;
pub use trireme_train::{Dataset, Sample, Task};

use clap::{CommandFactory, Parser, Subcommand};
use interrupts::end_as_first_process;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

const EXAMPLES: &str = r#"A first run needs nothing but this program:

    trireme init first && cd first && trireme train

There, to train on a text of your own:

    trireme train --set 'data.inputs=["book.txt"]' --set run.name=book
    trireme generate runs/book --prompt "Once"
    trireme eval runs/book other.txt
"#;

/// The command by which this program runs a chat template in a child process.
const RENDER_CHAT_TEMPLATE: &str = "render-chat-template";

/// Distributed deep-learning training: one binary, one config file.
#[derive(Debug, Parser)]
#[command(version, after_help = EXAMPLES)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Init(commands::init::InitArgs),
    Train(commands::train::TrainArgs),
    Prepare(commands::prepare::PrepareArgs),
    /// Look into prepared corpora.
    #[command(subcommand)]
    Data(commands::data::DataCommand),
    Generate(commands::generate::GenerateArgs),
    Eval(commands::eval::EvalArgs),
    /// Inspect checkpoints, and export models from them.
    #[command(subcommand)]
    Checkpoint(commands::checkpoint::CheckpointCommand),
    Config(commands::config::ConfigArgs),
    Plan(commands::plan::PlanArgs),
    /// Show the results of a run.
    #[command(subcommand)]
    Report(commands::report::ReportCommand),
    Doctor(commands::doctor::DoctorArgs),
    /// Measure the speed of this machine and this build.
    #[command(subcommand)]
    Bench(commands::bench::BenchCommand),
    FlightRecorder(commands::flight_recorder::FlightRecorderArgs),
    Completions(commands::completions::CompletionsArgs),
    Man(commands::completions::ManArgs),
    #[command(hide = true)]
    ProveKernels(commands::prove_kernels::ProveKernelsArgs),
    /// Run the chat template of the process that started this one.
    #[command(hide = true, name = RENDER_CHAT_TEMPLATE)]
    RenderChatTemplate,
}

/// The commands of a program with a task of its own.
#[derive(Debug, Parser)]
#[command(version, about = "Train this program's model", long_about = None)]
struct TaskArguments {
    #[command(subcommand)]
    command: TaskCommand,
}

#[derive(Debug, Subcommand)]
enum TaskCommand {
    /// Train the model.
    ///
    /// Starts the workers of this host itself, unless another launcher has set RANK and WORLD_SIZE (torchrun),
    /// SLURM_PROCID or OMPI_COMM_WORLD_RANK. Run the command again to resume from the newest checkpoint.
    #[command(after_help = "")]
    Train(commands::train::TrainArgs),
    #[command(after_help = "")]
    Plan(commands::plan::PlanArgs),
    /// Show the results of a run.
    #[command(subcommand)]
    Report(commands::report::ReportCommand),
    #[command(hide = true)]
    ProveKernels(commands::prove_kernels::ProveKernelsArgs),
}

/// Runs the `trireme` command with the arguments of this process.
pub fn run_command() -> ExitCode {
    trireme_data::isolate_chat_templates(&[RENDER_CHAT_TEMPLATE]);
    run_and_exit_code(|started| match parse::<Arguments>().command {
        Command::Init(args) => commands::init::run(&args),
        Command::Train(args) => commands::train::run(&args, started, None),
        Command::Prepare(args) => commands::prepare::run(&args),
        Command::Data(args) => commands::data::run(&args),
        Command::Generate(args) => commands::generate::run(&args),
        Command::Eval(args) => commands::eval::run(&args),
        Command::Checkpoint(args) => commands::checkpoint::run(&args),
        Command::Config(args) => commands::config::run(&args),
        Command::Plan(args) => commands::plan::run(&args, None, started),
        Command::Report(args) => commands::report::run(&args),
        Command::Doctor(args) => commands::doctor::run(&args, started),
        Command::Bench(args) => commands::bench::run(&args, started),
        Command::FlightRecorder(args) => commands::flight_recorder::run(&args),
        Command::Completions(args) => commands::completions::completions(&args, Arguments::command()),
        Command::Man(args) => commands::completions::man(&args, Arguments::command()),
        Command::ProveKernels(args) => commands::prove_kernels::run(&args),
        Command::RenderChatTemplate => Ok(trireme_data::serve_chat_template()?),
    })
}

/// Runs a program that trains `task`, with the arguments of this process: `train CONFIG`, `plan CONFIG` or `report`.
///
/// The config has the sections and keys of `trireme`, without `[data]`, `[generate]`, the description of a model in `[model]`, and
/// `[training] seq_len`. Call this first in `main`: it starts the program again for each further worker. Errors are printed, and the exit
/// codes are the codes of `trireme`.
pub fn run(task: impl Task + 'static) -> ExitCode {
    let task: Arc<dyn Task> = Arc::new(task);
    run_and_exit_code(|started| match parse::<TaskArguments>().command {
        TaskCommand::Train(args) => commands::train::run(&args, started, Some(&task)),
        TaskCommand::Plan(args) => commands::plan::run(&args, Some(&*task), started),
        TaskCommand::Report(args) => commands::report::run(&args),
        TaskCommand::ProveKernels(args) => commands::prove_kernels::run(&args),
    })
}

/// Parses the arguments of this process. Exits if they are invalid.
fn parse<P: Parser>() -> P {
    P::try_parse().unwrap_or_else(|mut error| {
        if let Some(hint) = argument_hints::hint(&error, std::env::args().nth(1).as_deref()) {
            argument_hints::add(&mut error, hint);
        }
        error.exit()
    })
}

fn run_and_exit_code(run: impl FnOnce(Instant) -> anyhow::Result<()>) -> ExitCode {
    let started = started::command_started();
    open_files::raise_limit();
    let prepared = launch::die_with_parent().map_err(Into::into).and_then(|()| Ok(end_as_first_process()?));
    match prepared.and_then(|()| run(started)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => ExitCode::from(console::report_error(&error)),
    }
}
