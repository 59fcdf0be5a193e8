//! The `trireme` command.

use std::process::ExitCode;

fn main() -> ExitCode {
    trireme::run_command()
}
