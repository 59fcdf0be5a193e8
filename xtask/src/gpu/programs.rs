//! The programs of the parts, and their execution within a time.

use crate::commands::{build, cargo, line, output};
use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::Value;
use std::fs;
use std::io::{Read, Seek};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// Suites of the crate `trireme-tensor` that a backend must pass.
pub(super) const SUITES: [&str; 2] = ["conformance", "operations"];

/// The programs, and the machine that they run on.
#[derive(Debug, Clone)]
pub(super) struct Programs {
    root: PathBuf,
    folder: PathBuf,
    python: PathBuf,
    is_quick: bool,
    gpus: Vec<String>,
    ends_at: Option<Instant>,
}

impl Programs {
    /// Builds the programs and copies them to a folder.
    pub(super) fn build(root: &Path, folder: &Path) -> Result<()> {
        let target = build(root)?;
        fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let copy = |from: &Path, name: &str| {
            let to = folder.join(name);
            fs::copy(from, &to).with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))
        };
        copy(&target.join("release/trireme"), "trireme")?;
        copy(&std::env::current_exe()?, "xtask")?;
        let mut tests = cargo(root);
        tests.args(["test", "--workspace", "--no-run", "--message-format", "json"]);
        tests.args(SUITES.iter().flat_map(|suite| ["--test", suite]));
        for (suite, path) in test_binaries(&output(&mut tests)?) {
            copy(&path, &suite)?;
        }
        Ok(())
    }

    /// Finds the programs and the GPUs.
    pub(super) fn open(root: PathBuf, folder: PathBuf, python: PathBuf, is_quick: bool) -> Result<Self> {
        for name in SUITES.into_iter().chain(["trireme"]) {
            if !folder.join(name).is_file() {
                bail!("{} is missing; run `cargo xtask gpu --prepare` first", folder.join(name).display());
            }
        }
        let mut programs = Programs { root, folder, python, is_quick, gpus: Vec::new(), ends_at: None };
        let doctor: Value = serde_json::from_str(&output(programs.trireme().args([
            "doctor",
            "--json",
            "--seconds",
            "0.01",
        ]))?)?;
        let gpus = doctor["cuda"]["gpus"].as_array().cloned().unwrap_or_default();
        programs.gpus = gpus.iter().filter_map(|gpu| gpu["name"].as_str()).map(str::to_owned).collect();
        if programs.gpus.is_empty() {
            bail!("this machine has no GPU that can be used; `trireme doctor` tells why");
        }
        Ok(programs)
    }

    /// Returns the programs with a time after which they are ended.
    pub(super) fn until(&self, duration_max: Duration) -> Self {
        Programs { ends_at: Some(Instant::now() + duration_max), ..self.clone() }
    }

    pub(super) fn is_quick(&self) -> bool {
        self.is_quick
    }

    /// Returns the name of the first GPU.
    pub(super) fn device(&self) -> &str {
        &self.gpus[0]
    }

    pub(super) fn num_gpus(&self) -> usize {
        self.gpus.len()
    }

    /// Returns the heading of the column of figures.
    pub(super) fn title(&self) -> String {
        match self.num_gpus() {
            1 => self.device().to_owned(),
            num => format!("{num} x {}", self.device()),
        }
    }

    pub(super) fn trireme(&self) -> Command {
        self.command(self.folder.join("trireme"))
    }

    /// Returns a command of a suite, on the machine's first GPU.
    pub(super) fn suite(&self, suite: &str) -> Command {
        self.on_gpu(self.command(self.folder.join(suite)))
    }

    /// Returns a command that runs a suite under compute-sanitizer.
    pub(super) fn sanitized_suite(&self, suite: &str) -> Command {
        let mut command = self.command("compute-sanitizer");
        // Trireme asks the driver for kernels that a module does not have, which is no mistake.
        command.args(["--report-api-errors", "no", "--error-exitcode", "9"]).arg(self.folder.join(suite));
        self.on_gpu(command)
    }

    fn on_gpu(&self, mut suite: Command) -> Command {
        suite.env("TRIREME_TEST_GPU", "1").args(["--test-threads", "4"]);
        suite
    }

    pub(super) fn python(&self) -> Command {
        self.command(&self.python)
    }

    /// Returns whether Python has PyTorch for CUDA.
    pub(super) fn has_torch(&self) -> bool {
        let check = "import torch; assert torch.cuda.is_available()";
        self.run(self.python().args(["-c", check])).is_ok()
    }

    /// Returns a command of a program in PATH, if it is there.
    pub(super) fn in_path(&self, program: &str) -> Option<Command> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let is_there = std::env::split_paths(&path).any(|folder| folder.join(program).is_file());
        is_there.then(|| self.command(program))
    }

    fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.root);
        command
    }

    /// Runs a command that must succeed before the time is over. Returns its standard output.
    pub(super) fn run(&self, command: &mut Command) -> Result<String> {
        let (is_success, [stdout, stderr]) = self.outcome(command)?;
        if !is_success {
            let lines: Vec<&str> = stderr.lines().collect();
            bail!("{} failed: {}", line(command), lines[lines.len().saturating_sub(5)..].join("\n"));
        }
        Ok(stdout)
    }

    /// Runs a command before the time is over. Returns whether it succeeded, its standard output and its error output.
    pub(super) fn outcome(&self, command: &mut Command) -> Result<(bool, [String; 2])> {
        let (mut stdout, mut stderr) = (tempfile::tempfile()?, tempfile::tempfile()?);
        command.stdin(Stdio::null()).stdout(stdout.try_clone()?).stderr(stderr.try_clone()?);
        // A group of its own, so that what the program starts ends with it.
        let mut child =
            command.process_group(0).spawn().with_context(|| format!("cannot start {}", line(command)))?;
        let group = Pid::from_child(&child);
        let remaining =
            self.ends_at.map_or(Duration::MAX, |end| end.saturating_duration_since(Instant::now()));
        let (end_sender, end_receiver) = mpsc::channel::<()>();
        let (status, was_ended) = std::thread::scope(|scope| {
            let guard = scope.spawn(move || {
                end_receiver.recv_timeout(remaining) == Err(RecvTimeoutError::Timeout)
                    && kill_process_group(group, Signal::KILL).is_ok()
            });
            let status = child.wait();
            drop(end_sender);
            (status, guard.join().expect("the guard does not panic"))
        });
        let status = status?;
        if was_ended {
            bail!("{} was ended: the part has taken too long", line(command));
        }
        let read = |file: &mut fs::File| -> Result<String> {
            let mut bytes = Vec::new();
            file.rewind()?;
            file.read_to_end(&mut bytes)?;
            Ok(String::from_utf8_lossy(&bytes).into_owned())
        };
        Ok((status.success(), [read(&mut stdout)?, read(&mut stderr)?]))
    }

    /// Runs a command whose standard output is JSON objects, one per line.
    pub(super) fn json(&self, command: &mut Command) -> Result<Vec<Value>> {
        let text = self.run(command)?;
        let objects =
            serde_json::Deserializer::from_str(&text).into_iter().collect::<Result<Vec<Value>, _>>();
        objects.with_context(|| format!("{} printed no JSON: {text}", line(command)))
    }
}

/// Returns the name and the path of each test binary in the messages of `cargo test --no-run`.
fn test_binaries(messages: &str) -> Vec<(String, PathBuf)> {
    let binary = |message: &str| {
        let message: Value = serde_json::from_str(message).ok()?;
        let name = message["target"]["name"].as_str()?.to_owned();
        let path = message["executable"].as_str()?.into();
        SUITES.contains(&name.as_str()).then_some((name, path))
    };
    messages.lines().filter_map(binary).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn binaries_are_found_in_the_messages_of_cargo() {
        let messages = "{\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"conformance\"},\"executable\":\"/t/conformance-1\"}\n\
            {\"reason\":\"compiler-artifact\",\"target\":{\"name\":\"serde\"},\"executable\":null}\nnote\n";
        assert_eq!(test_binaries(messages), [("conformance".to_owned(), PathBuf::from("/t/conformance-1"))]);
    }

    #[test]
    fn programs_end_in_time() {
        let programs = Programs {
            root: PathBuf::from("."),
            folder: PathBuf::new(),
            python: PathBuf::new(),
            is_quick: true,
            gpus: Vec::new(),
            ends_at: Some(Instant::now()),
        };
        let error = programs.run(Command::new("sleep").arg("60")).unwrap_err().to_string();
        assert!(error.contains("sleep 60 was ended"), "{error}");
        let in_time = programs.until(Duration::from_secs(60));
        assert_eq!(in_time.run(Command::new("echo").arg("hi")).unwrap(), "hi\n");
        assert!(in_time.run(&mut Command::new("false")).unwrap_err().to_string().contains("false failed"));
    }
}
