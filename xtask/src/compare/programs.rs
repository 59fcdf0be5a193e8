//! The programs that are compared, their preparation and execution.

use super::rows::{BenchCommand, Program};
use crate::commands::{build, output, succeed, virtual_environment};
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

pub(super) struct Programs {
    root: PathBuf,
    binary: PathBuf,
    python: PathBuf,
    /// PyTorch's cache of compiled code, shared by all rounds.
    compiled_folder: PathBuf,
    open_mpi: Option<OpenMpi>,
}

struct OpenMpi {
    version: String,
    all_reduce: PathBuf,
}

impl Programs {
    /// Builds Trireme, and installs PyTorch into the target folder unless `python` is given.
    pub(super) fn prepare(root: &Path, python: Option<PathBuf>) -> Result<Self> {
        let target = build(root)?;
        let folder = target.join("compare");
        fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let python = match python {
            // Commands run in the root; a bare name is looked up in PATH.
            Some(python) if python.exists() => std::path::absolute(python)?,
            Some(python) => python,
            None => virtual_environment(root, &target.join("peers-venv"))?,
        };
        let open_mpi = OpenMpi::prepare(root, &folder)?;
        let compiled_folder = folder.join("inductor");
        let (root, binary) = (root.to_owned(), target.join("release/trireme"));
        Ok(Programs { root, binary, python, compiled_folder, open_mpi })
    }

    pub(super) fn open_mpi_version(&self) -> Option<&str> {
        self.open_mpi.as_ref().map(|open_mpi| open_mpi.version.as_str())
    }

    pub(super) fn has(&self, program: Program) -> bool {
        program != Program::OpenMpi || self.open_mpi.is_some()
    }

    pub(super) fn run(&self, run: &BenchCommand) -> Result<Vec<Value>> {
        let mut command = match run.program {
            Program::TriremeBinary => {
                let metadata = fs::metadata(&self.binary)
                    .with_context(|| format!("cannot read {}", self.binary.display()))?;
                return Ok(Vec::from([json!({ "installed_bytes": metadata.len() })]));
            }
            Program::Trireme => Command::new(&self.binary),
            Program::Python => Command::new(&self.python),
            Program::Torchrun => {
                let mut command = Command::new(&self.python);
                command.args(["-m", "torch.distributed.run", "--nproc-per-node", "2"]);
                command
            }
            Program::OpenMpi => {
                let open_mpi = self.open_mpi.as_ref().context("Open MPI is not installed")?;
                let mut command = Command::new("mpirun");
                command.args(["-n", "2"]).arg(&open_mpi.all_reduce);
                command
            }
        };
        command.args(run.arguments.split(' ')).current_dir(&self.root);
        // Each script sets its own number of threads. Without the variable, torchrun prints a warning.
        command.env("OMP_NUM_THREADS", "1");
        command.env("PYTHONDONTWRITEBYTECODE", "1");
        command.env("TORCHINDUCTOR_CACHE_DIR", &self.compiled_folder);
        command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        parse(&output(&mut command)?)
    }
}

impl OpenMpi {
    /// Compiles the benchmark of Open MPI. `None` if Open MPI's compiler or launcher is not installed.
    fn prepare(root: &Path, folder: &Path) -> Result<Option<Self>> {
        let Ok(version) = output(Command::new("mpirun").arg("--version")) else { return Ok(None) };
        let version = version.lines().next().unwrap_or_default().replace("mpirun (Open MPI) ", "Open MPI ");
        let has_compiler = Command::new("mpicc").arg("--version").output().is_ok();
        if !version.starts_with("Open MPI ") || !has_compiler {
            return Ok(None);
        }
        let all_reduce = folder.join("mpi_all_reduce");
        succeed(
            Command::new("mpicc")
                .args(["-O2", "peers/mpi_all_reduce.c", "-o"])
                .arg(&all_reduce)
                .current_dir(root),
        )?;
        Ok(Some(OpenMpi { version, all_reduce }))
    }
}

/// Parses a text that consists of one or more JSON objects.
fn parse(text: &str) -> Result<Vec<Value>> {
    let objects: Vec<Value> = serde_json::Deserializer::from_str(text)
        .into_iter()
        .collect::<Result<_, _>>()
        .with_context(|| format!("expected JSON, found: {}", text.trim()))?;
    if objects.is_empty() {
        bail!("expected JSON, found nothing");
    }
    Ok(objects)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_is_read_object_by_object() {
        assert_eq!(parse("{\"a\": 1}\n{\"a\": 2}\n").unwrap(), [json!({"a": 1}), json!({"a": 2})]);
        assert_eq!(parse("{\n  \"a\": [1]\n}\n").unwrap(), [json!({"a": [1]})]);
        for wrong in ["", "\n", "Traceback", "{\"a\": 1} done", "{\"a\":"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_command_that_fails_tells_its_last_lines() {
        let script = "echo one >&2; for i in 2 3 4 5 6; do echo $i >&2; done; exit 3";
        let error = output(Command::new("sh").args(["-c", script])).unwrap_err().to_string();
        assert!(error.ends_with("exit status: 3\n2\n3\n4\n5\n6"), "{error}");
    }
}
