//! Runs other programs: commands that must succeed, and Python with the packages of `peers/requirements.txt`.

use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns the path of a Python with the packages of `peers/requirements.txt`. Installs them into `folder`, a virtual environment, unless
/// it has them.
pub(crate) fn virtual_environment(root: &Path, folder: &Path) -> Result<PathBuf> {
    let python = folder.join("bin/python");
    let requirements = root.join("peers/requirements.txt");
    let wanted =
        fs::read(&requirements).with_context(|| format!("cannot read {}", requirements.display()))?;
    // A copy of the requirements records that they are installed.
    let installed = folder.join("requirements.txt");
    if fs::read(&installed).is_ok_and(|installed| installed == wanted) {
        return Ok(python);
    }
    succeed(Command::new("python3").args(["-m", "venv"]).arg(folder))?;
    succeed(Command::new(&python).args(["-m", "pip", "install", "--requirement"]).arg(&requirements))?;
    fs::write(&installed, wanted).with_context(|| format!("cannot write {}", installed.display()))?;
    Ok(python)
}

/// Returns a command of Cargo in the root of the workspace.
pub(crate) fn cargo(root: &Path) -> Command {
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
    cargo.current_dir(root);
    cargo
}

/// Builds Trireme as `release/trireme` in the target folder. Returns the target folder.
pub(crate) fn build(root: &Path) -> Result<PathBuf> {
    succeed(cargo(root).args(["build", "--release", "--bin", "trireme"]))?;
    Ok(std::env::var_os("CARGO_TARGET_DIR").map_or(root.join("target"), |folder| root.join(folder)))
}

/// Runs a command that must succeed. Its standard output goes to the error output, because the standard output is for the tables.
pub(crate) fn succeed(command: &mut Command) -> Result<()> {
    let status = command
        .stdout(std::io::stderr())
        .status()
        .with_context(|| format!("cannot start {}", line(command)))?;
    if !status.success() {
        bail!("{} failed: {status}", line(command));
    }
    Ok(())
}

pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot start {}", line(command)))?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        let lines: Vec<&str> = errors.lines().collect();
        let last = lines[lines.len().saturating_sub(5)..].join("\n");
        bail!("{} failed: {}\n{last}", line(command), output.status);
    }
    String::from_utf8(output.stdout)
        .with_context(|| format!("{} printed something that is not text", line(command)))
}

/// Returns the command line of a command.
pub(crate) fn line(command: &Command) -> String {
    let words = [command.get_program()].into_iter().chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}
