//! Development tasks of the workspace, as subcommands of `cargo xtask`: `tidy`, `kernels`, `ladder`, `compare`, `faults`, `foreign`,
//! `gpu`, `slurm` and `surveys`.

mod commands;
mod compare;
mod faults;
mod foreign;
mod gpu;
mod kernels;
mod slurm;
mod surveys;
mod tidy;

use anyhow::{Context, Result};
use clap::Parser;
use std::path::Path;
use std::process::ExitCode;

/// Development tasks of the workspace.
#[derive(Debug, clap::Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
enum XtaskCommand {
    /// Check the rules that the compiler does not enforce.
    ///
    /// The rules are about dependencies between crates, places for unsafe code, words and calls that do not belong in the sources, and the
    /// form and length of files.
    Tidy,
    Kernels(kernels::KernelsArgs),
    /// Train small models on every layout, and print how far their losses are from the losses of one worker.
    ///
    /// `cargo test` trains a part of these combinations, and this command all of them: some 500 runs, for minutes. It fails if a loss
    /// differs by more than allowed. Without a tensor axis or a context axis, no difference is allowed.
    Ladder,
    Compare(compare::CompareArgs),
    Faults(faults::FaultsArgs),
    Foreign(foreign::ForeignArgs),
    Gpu(gpu::GpuArgs),
    Slurm(slurm::SlurmArgs),
    Surveys(surveys::SurveysArgs),
}

fn main() -> ExitCode {
    let succeeded = match XtaskCommand::parse() {
        XtaskCommand::Tidy => tidy::run(workspace_root()),
        XtaskCommand::Kernels(args) => kernels::run(&args, workspace_root()).map(|()| true),
        XtaskCommand::Ladder => ladder(workspace_root()),
        XtaskCommand::Compare(args) => compare::run(&args, workspace_root()),
        XtaskCommand::Faults(args) => faults::run(&args, workspace_root()).map(|()| true),
        XtaskCommand::Foreign(args) => foreign::run(&args, workspace_root()),
        XtaskCommand::Gpu(args) => gpu::run(&args, workspace_root()),
        XtaskCommand::Slurm(args) => slurm::run(&args, workspace_root()),
        XtaskCommand::Surveys(args) => surveys::run(&args, workspace_root()).map(|()| true),
    };
    match succeeded {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs `cargo xtask ladder`.
fn ladder(root: &Path) -> Result<bool> {
    let cargo = |arguments: &[&str]| -> Result<bool> {
        Ok(commands::cargo(root).args(arguments).status().context("cannot run cargo")?.success())
    };
    let example = ["build", "--quiet", "--package", "residual_network"];
    let table = "layouts::every_layout_trains_every_model_as_one_worker_does";
    let test = ["test", "--quiet", "--package", "trireme", "--test", "command"];
    let only_table = ["--", "--nocapture", "--include-ignored", "--exact", table];
    Ok(cargo(&example)? && cargo(&[&test[..], &only_table].concat())?)
}

fn workspace_root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("this crate lies in the workspace's folder")
}
