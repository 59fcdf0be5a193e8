//! `cargo xtask faults`: injects faults into runs with checkpoints. Each system call that changes files fails, kills its process, or
//! stops its process for a while. After every fault, the next command must resume to the losses of the undisturbed run, and leave nothing
//! unfinished behind.
//!
//! The faults are injected by strace, which counts the calls of each thread separately.

use anyhow::{Context, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process_group};
use std::collections::BTreeMap;
use std::fs;
use std::num::NonZeroUsize;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

/// The system calls by which a run changes files.
const CALLS: [&str; 13] = [
    "openat",
    "write",
    "pwrite64",
    "ftruncate",
    "fsync",
    "fdatasync",
    "rename",
    "renameat2",
    "unlink",
    "unlinkat",
    "rmdir",
    "mkdir",
    "mkdirat",
];

/// The faults: an I/O error, a full disk, a kill, and a stop with a later continuation.
const FAULTS: [&str; 4] = ["error=EIO", "error=ENOSPC", "signal=SIGKILL", "signal=SIGSTOP"];

/// Output file of strace, in the folder of the runs.
const LOG: &str = "calls.txt";

/// Interval between SIGCONTs, which continue processes that a fault has stopped.
const CONTINUE_INTERVAL: Duration = Duration::from_millis(20);

const CONFIG: &str = r#"
model = { architecture = "gpt2", hidden_size = 16, num_layers = 1, num_heads = 2 }
data = { folder = "corpus" }
training = { local_batch_size = 2, global_batch_size = 4, seq_len = 16, steps = 6, threads = 1 }
checkpoint = { interval = 2, keep_latest_k = 1 }
metrics = { log_interval = 1000 }
generate = { num_tokens = 0 }
"#;

/// Runs the training command in `folder`, with and without faults.
struct FaultRunner {
    folder: PathBuf,
    binary: PathBuf,
    num_workers: NonZeroUsize,
}

struct Injection<'a> {
    call: &'a str,
    fault: &'a str,
    /// Number of the call among those of its thread, from 1.
    number: usize,
}

enum Outcome {
    Failed,
    Survived,
    /// No thread made that many calls.
    NotReached,
}

impl Injection<'_> {
    /// Returns the text that strace writes when it has injected the fault.
    fn trace_text(&self) -> &'static str {
        match self.fault {
            "signal=SIGKILL" => "killed by SIGKILL",
            "signal=SIGSTOP" => "SIGSTOP",
            _ => "(INJECTED)",
        }
    }
}

/// Inject a fault at each system call of a run with checkpoints.
///
/// Each call by which a small run changes files fails, finds the disk full, is the last one of its process, or stops its
/// process for a moment. The next command must resume to the losses of the undisturbed run and leave nothing unfinished
/// behind. Needs strace.
#[derive(Debug, clap::Args)]
pub(crate) struct FaultsArgs {
    /// The program, built by `cargo build --release`.
    #[arg(long, value_name = "PATH", default_value = "target/release/trireme")]
    binary: PathBuf,
    /// Workers of the run.
    #[arg(long, value_name = "N", default_value_t = NonZeroUsize::MIN)]
    workers: NonZeroUsize,
    /// Inject at one call in N of each kind only.
    #[arg(long, value_name = "N", default_value_t = NonZeroUsize::MIN)]
    stride: NonZeroUsize,
}

/// Runs `cargo xtask faults`. If a check fails, the files are kept for inspection.
pub(crate) fn run(args: &FaultsArgs, root: &Path) -> Result<()> {
    let binary = fs::canonicalize(root.join(&args.binary))
        .with_context(|| format!("no program at {}; run `cargo build --release`", args.binary.display()))?;
    let folder = std::env::temp_dir().join(format!("trireme-faults-{}", std::process::id()));
    fs::create_dir(&folder)?;
    let runner = FaultRunner { folder: folder.clone(), binary, num_workers: args.workers };
    runner.run_all(args.stride.get()).with_context(|| format!("the files are in {}", folder.display()))?;
    Ok(fs::remove_dir_all(&folder)?)
}

impl FaultRunner {
    fn run_all(&self, stride: usize) -> Result<()> {
        fs::write(self.folder.join("job.toml"), CONFIG)?;
        fs::write(self.folder.join("text.txt"), "a text of words that come again and again\n".repeat(200))?;
        succeeded(&self.command(&["prepare", "text.txt", "--out", "corpus"]).output()?)?;
        succeeded(&self.train().output()?)?;
        let losses = self.losses()?;
        ensure!(losses.lines().count() == 6, "the undisturbed run has six steps:\n{losses}");
        let counts = self.count_calls()?;
        let num_calls: usize = counts.values().sum();
        println!("{num_calls} calls in the longest thread: {counts:?}");
        let (mut num_ended, mut num_survived) = (0, 0);
        for fault in FAULTS {
            for (call, &count) in &counts {
                for number in (1..=count).step_by(stride) {
                    let what = format!("{call} {number} of {count}, {fault}");
                    match self.check(&Injection { call, fault, number }, &losses).context(what)? {
                        Outcome::Failed => num_ended += 1,
                        Outcome::Survived => num_survived += 1,
                        Outcome::NotReached => {}
                    }
                }
                println!("{fault} in {call}: every run resumed to the losses of the undisturbed run");
            }
        }
        println!(
            "{} faults: {num_survived} runs went to their end, {num_ended} ended and resumed; nothing was lost or left behind",
            num_ended + num_survived
        );
        Ok(())
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.binary);
        command.args(arguments).current_dir(&self.folder).stdin(Stdio::null());
        command
    }

    fn train(&self) -> Command {
        self.command(&["train", "job.toml", "--workers", &self.num_workers.to_string()])
    }

    /// Trains under strace, which traces the calls of `expressions` to [`LOG`].
    fn train_under_strace(&self, expressions: &[String]) -> Result<Output> {
        let mut command = Command::new("strace");
        command.args(["-f", "-q", "-o", LOG]);
        for expression in expressions {
            command.args(["-e", expression]);
        }
        let train = self.train();
        command.arg("--").arg(train.get_program()).args(train.get_args()).current_dir(&self.folder);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let child = command.process_group(0).spawn();
        let child = child.context("cannot run strace, which injects the faults; install it")?;
        let group = Pid::from_child(&child);
        let (end_sender, end_receiver) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                while end_receiver.recv_timeout(CONTINUE_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                    // Fails if no process is left to be continued.
                    let _ = kill_process_group(group, Signal::CONT);
                }
            });
            let output = child.wait_with_output();
            drop(end_sender);
            Ok(output?)
        })
    }

    fn remove_run(&self) -> Result<()> {
        Ok(fs::remove_dir_all(self.folder.join("runs"))?)
    }

    /// Returns the maximum number of calls of each kind that a thread of a run makes.
    fn count_calls(&self) -> Result<BTreeMap<String, usize>> {
        self.remove_run()?;
        succeeded(&self.train_under_strace(&[format!("trace={}", CALLS.join(","))])?)?;
        let mut counts: BTreeMap<(String, String), usize> = BTreeMap::new();
        for line in self.log()?.lines() {
            let Some((thread, rest)) = line.split_once(char::is_whitespace) else { continue };
            let Some((call, _)) = rest.trim_start().split_once('(') else { continue };
            if CALLS.contains(&call) {
                *counts.entry((call.to_owned(), thread.to_owned())).or_default() += 1;
            }
        }
        let mut most: BTreeMap<String, usize> = BTreeMap::new();
        for ((call, _), count) in counts {
            let entry = most.entry(call).or_default();
            *entry = count.max(*entry);
        }
        Ok(most)
    }

    fn log(&self) -> Result<String> {
        let bytes = fs::read(self.folder.join(LOG)).context("strace has traced nothing")?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Runs once with a fault, and once without a fault to resume. Checks the result.
    fn check(&self, injection: &Injection<'_>, losses: &str) -> Result<Outcome> {
        let Injection { call, fault, number } = injection;
        self.remove_run()?;
        fs::remove_file(self.folder.join(LOG))?;
        let inject = format!("inject={call}:{fault}:when={number}");
        let disturbed = self.train_under_strace(&[format!("trace={call}"), inject])?;
        let text = describe(&disturbed);
        ensure!(!text.contains("panicked"), "the run panicked:\n{text}");
        let log = self.log()?;
        let is_reached = log.contains(injection.trace_text());
        ensure!(is_reached || disturbed.status.success(), "the run failed without a fault:\n{text}");
        // A run that is killed before its folder was created has left nothing to resume.
        fs::create_dir_all(self.folder.join("runs"))?;
        succeeded(&self.train().output()?).with_context(|| format!("after\n{text}"))?;
        let found = self.losses()?;
        ensure!(found == losses, "the losses differ:\n{found}after\n{text}");
        self.check_nothing_is_left()?;
        Ok(match (is_reached, disturbed.status.success()) {
            (false, _) => Outcome::NotReached,
            (true, true) => Outcome::Survived,
            (true, false) => Outcome::Failed,
        })
    }

    /// Returns the steps and losses of the run, one step per line.
    fn losses(&self) -> Result<String> {
        let metrics = fs::read_to_string(self.folder.join("runs/job/metrics.jsonl"))?;
        let line = |line: &str| -> Result<String> {
            let record: serde_json::Value = serde_json::from_str(line)?;
            Ok(format!("{} {}\n", record["step"], record["loss"]))
        };
        metrics.lines().map(line).collect()
    }

    fn check_nothing_is_left(&self) -> Result<()> {
        let names = names(&self.folder.join("runs/job/checkpoints"))?;
        ensure!(names == ["latest", "step-6"], "checkpoints: {names:?}");
        for (folder, known) in [
            (self.folder.clone(), &[LOG, "corpus", "job.toml", "runs", "text.txt"][..]),
            (self.folder.join("runs"), &["job"]),
            (
                self.folder.join("corpus"),
                &["prepare.json", "tokenizer.bytes.json", "train.tokens", "validation.tokens"],
            ),
        ] {
            let found = self::names(&folder)?;
            if let Some(other) = found.iter().find(|name| !known.contains(&name.as_str())) {
                bail!("{} holds {other}", folder.display());
            }
        }
        Ok(())
    }
}

fn names(folder: &Path) -> Result<Vec<String>> {
    let name = |entry: std::io::Result<fs::DirEntry>| Ok(entry?.file_name().to_string_lossy().into_owned());
    let mut names = fs::read_dir(folder)?.map(name).collect::<Result<Vec<_>>>()?;
    names.sort();
    Ok(names)
}

fn succeeded(output: &Output) -> Result<()> {
    ensure!(output.status.success(), "a command without a fault failed:\n{}", describe(output));
    Ok(())
}

fn describe(output: &Output) -> String {
    let [stdout, stderr] = [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    format!("{}\n{stdout}{stderr}", output.status)
}
