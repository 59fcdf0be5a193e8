//! Chores of the workspace: `cargo xtask tidy`, `cargo xtask kernels`, `cargo xtask compare` and `cargo xtask faults`.

mod compare;
mod faults;
mod kernels;
mod tidy;

use clap::Parser;
use std::path::Path;
use std::process::ExitCode;

/// Chores of the workspace.
#[derive(Debug, clap::Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
enum Chore {
    /// Check what the compiler does not.
    ///
    /// Which crate may depend on which, where unsafe code may be, words and calls that do not belong in the sources, and
    /// the form and length of files.
    Tidy,
    Kernels(kernels::KernelsArgs),
    Compare(compare::CompareArgs),
    Faults(faults::FaultsArgs),
}

fn main() -> ExitCode {
    let succeeded = match Chore::parse() {
        Chore::Tidy => tidy::run(workspace_root()),
        Chore::Kernels(args) => kernels::run(&args, workspace_root()).map(|()| true),
        Chore::Compare(args) => compare::run(&args, workspace_root()),
        Chore::Faults(args) => faults::run(&args, workspace_root()).map(|()| true),
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

fn workspace_root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("this crate lies in the workspace's folder")
}
