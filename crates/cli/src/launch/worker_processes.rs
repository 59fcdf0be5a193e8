use super::LaunchError;
use super::error::stopped_by;
use crate::diagnostics::message;
use crate::process_state::{AbnormalExit, ProcessState, ProcessStates};
use crate::timeout::run_with_timeout;
use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};
use std::borrow::Cow;
use std::fs::OpenOptions;
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::process::{ExitStatusExt, parent_id};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};
use trireme_base::{Rank, open_regular, open_regular_with, with_resource_limits};

/// Exit code of a worker that ends because it has lost a peer, and so is not the cause of the failure.
pub(crate) const LOST_PEER_EXIT_CODE: u8 = 74;

/// Environment variable with the process id of the launcher that has started a worker.
const LAUNCHER_VARIABLE: &str = "TRIREME_LAUNCHER_PID";

/// Time that a killed worker has to end. Only a system call takes longer, such as one on a file system that hangs.
const KILL_GRACE: Duration = Duration::from_secs(2);

/// Interval at which killed workers are checked for their end.
const KILL_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Maximum time to read the end of a log.
const READ_TIMEOUT: Duration = Duration::from_secs(1);

/// Environment variable with the path of rank 0's log.
const ERROR_LOG_VARIABLE: &str = "TRIREME_ERROR_LOG";

/// Makes a worker of Trireme's launcher die with the launcher; does nothing in other processes. Call it first, from a thread that lives as
/// long as the process.
pub(crate) fn die_with_parent() -> Result<(), LaunchError> {
    let Ok(launcher) = std::env::var(LAUNCHER_VARIABLE) else { return Ok(()) };
    set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|error| LaunchError::Supervise { source: error.into() })?;
    // A launcher that died before the call above sends nothing, and the worker has got another parent.
    if launcher == parent_id().to_string() { Ok(()) } else { Err(LaunchError::LauncherGone) }
}

/// Whether Trireme's launcher has started this process.
pub(crate) fn is_under_launcher() -> bool {
    std::env::var_os(LAUNCHER_VARIABLE).is_some()
}

/// Returns the log to which rank 0 under Trireme's launcher writes the error that ends it; `None` in all other processes. The launcher,
/// which shares its output with rank 0, shows the end of this log.
pub(crate) fn error_log() -> Option<PathBuf> {
    std::env::var_os(ERROR_LOG_VARIABLE).map(PathBuf::from)
}

/// The processes of the workers of this host. None outlives this value, unless not even SIGKILL ends it.
pub(super) struct WorkerProcesses {
    workers: Vec<Worker>,
    /// Deadline of the wait for killed workers.
    kill_deadline: Option<Instant>,
}

struct Worker {
    rank: Rank,
    child: Child,
    /// Exit status, once the process has ended and been waited for.
    status: Option<ExitStatus>,
    log: PathBuf,
    /// Length of the log before this worker wrote to it.
    log_start: u64,
}

impl WorkerProcesses {
    pub(super) fn new() -> Self {
        WorkerProcesses { workers: Vec::new(), kill_deadline: None }
    }

    /// Starts the worker `rank` with `command`, and appends its output to `log`. Rank 0 shares the launcher's output instead and writes its
    /// log itself; it gets the path of the log for the error that ends it.
    pub(super) fn start(
        &mut self,
        rank: Rank,
        command: &mut Command,
        log: PathBuf,
    ) -> Result<(), LaunchError> {
        let refuse_log = |source| LaunchError::Log { rank, path: log.clone(), source };
        let log_file =
            open_regular_with(&log, OpenOptions::new().create(true).append(true)).map_err(refuse_log)?;
        let log_start = log_file.metadata().map_err(refuse_log)?.len();
        if rank == Rank::ROOT {
            command.env(ERROR_LOG_VARIABLE, &log);
        } else {
            command.stdout(log_file.try_clone().map_err(refuse_log)?).stderr(log_file);
        }
        let child = command
            .env(LAUNCHER_VARIABLE, std::process::id().to_string())
            .stdin(Stdio::null())
            .spawn()
            .map_err(|source| {
                let program = command.get_program().to_string_lossy().into_owned();
                LaunchError::Start { rank, program, source: with_resource_limits(source) }
            })?;
        self.workers.push(Worker { rank, child, status: None, log, log_start });
        Ok(())
    }

    /// Records which workers have ended.
    pub(super) fn reap(&mut self) -> io::Result<()> {
        for worker in self.workers.iter_mut().filter(|worker| worker.status.is_none()) {
            worker.status = worker.child.try_wait()?;
        }
        Ok(())
    }

    pub(super) fn are_running(&self) -> bool {
        self.workers.iter().any(|worker| worker.status.is_none())
    }

    /// Returns the first worker, by rank, that died of something other than the loss of a peer; else the first that died.
    pub(super) fn first_death(&self) -> Option<(Rank, AbnormalExit)> {
        let dead = || self.workers.iter().filter_map(|worker| Some((worker.rank, death(worker.status?)?)));
        dead().find(|(_, death)| !is_peer_loss(*death)).or_else(|| dead().next())
    }

    /// Returns the signal because of which workers have stopped gracefully, if all workers that have ended did so.
    pub(super) fn stopped_by(&self) -> Option<i32> {
        let mut ended = self.workers.iter().filter_map(|worker| worker.status);
        ended.all(|status| stop_signal(status).is_some()).then(|| self.first_stopped_by()).flatten()
    }

    /// Returns the signal because of which the first worker, by rank, has stopped gracefully, if one has.
    pub(super) fn first_stopped_by(&self) -> Option<i32> {
        self.workers.iter().filter_map(|worker| worker.status).find_map(stop_signal)
    }

    /// Returns the workers that have neither ended nor been suspended.
    pub(super) fn active(&self) -> impl Iterator<Item = Rank> {
        let is_active = |worker: &&Worker| worker.status.is_none() && !is_suspended(&worker.child);
        self.workers.iter().filter(is_active).map(|worker| worker.rank)
    }

    /// Returns the states of the workers that have ended abnormally or are suspended.
    pub(super) fn process_states(&self) -> ProcessStates {
        let fate = |worker: &Worker| match worker.status {
            Some(status) => death(status).map(ProcessState::Exited),
            None => is_suspended(&worker.child).then_some(ProcessState::Suspended),
        };
        self.workers.iter().filter_map(|worker| Some((worker.rank.0, fate(worker)?))).collect()
    }

    /// Kills the suspended workers. No other signal would end them.
    pub(super) fn kill_suspended(&self) {
        let running = self.workers.iter().filter(|worker| worker.status.is_none());
        for worker in running.filter(|worker| is_suspended(&worker.child)) {
            let _ = kill_process(Pid::from_child(&worker.child), Signal::KILL);
        }
    }

    pub(super) fn send(&self, signal: Signal) {
        for worker in self.workers.iter().filter(|worker| worker.status.is_none()) {
            // A child that has not been waited for keeps its id, so the signal reaches no other process.
            let _ = kill_process(Pid::from_child(&worker.child), signal);
        }
    }

    /// Kills every worker that has not ended, and waits until it has, 2 seconds at most.
    pub(super) fn kill(&mut self) -> io::Result<()> {
        self.send(Signal::KILL);
        let until = *self.kill_deadline.get_or_insert_with(|| Instant::now() + KILL_GRACE);
        self.wait(until)
    }

    fn wait(&mut self, until: Instant) -> io::Result<()> {
        loop {
            self.reap()?;
            if !self.are_running() || Instant::now() >= until {
                return Ok(());
            }
            thread::sleep(KILL_POLL_INTERVAL);
        }
    }

    /// Returns the error for the death of the worker `rank`, with the end of its log and a table of all workers.
    pub(super) fn report(&self, rank: Rank, death: AbnormalExit, table: Vec<String>) -> LaunchError {
        let worker = self.workers.iter().find(|worker| worker.rank == rank).expect("the rank was started");
        let (log, start) = (worker.log.clone(), worker.log_start);
        // An unreadable log is no reason to withhold the rest.
        let last_lines = run_with_timeout(READ_TIMEOUT, move || last_lines(&log, start).unwrap_or_default());
        let running = self.workers.iter().filter(|worker| worker.status.is_none());
        LaunchError::WorkerDied {
            rank,
            death,
            survivors: running.map(|worker| worker.rank).collect(),
            log: worker.log.clone(),
            last_lines: last_lines.unwrap_or_default(),
            table,
        }
    }
}

impl Drop for WorkerProcesses {
    fn drop(&mut self) {
        // A process that cannot be waited for is left alone.
        let _ = self.kill();
    }
}

/// Whether the process is suspended, by SIGSTOP or by a debugger.
fn is_suspended(child: &Child) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap_or_default();
    // The name of the process, in parentheses, may contain anything.
    let state = stat.rsplit_once(')').and_then(|(_, rest)| rest.trim_start().chars().next());
    matches!(state, Some('T' | 't'))
}

/// Returns the signal because of which a process has stopped gracefully, if it has.
fn stop_signal(status: ExitStatus) -> Option<i32> {
    status.code().and_then(stopped_by)
}

/// Returns the death of a process; `None` if it exited with 0 or stopped gracefully after a signal.
fn death(status: ExitStatus) -> Option<AbnormalExit> {
    match (status.code(), status.signal()) {
        (Some(0), _) => None,
        (Some(_), _) if stop_signal(status).is_some() => None,
        (Some(code), _) => Some(AbnormalExit::Exit(code)),
        (None, signal) => {
            Some(AbnormalExit::Signal(signal.expect("a process exits or is killed by a signal")))
        }
    }
}

/// Whether the exit code says that the worker has lost a peer.
pub(super) fn is_peer_loss(death: AbnormalExit) -> bool {
    death == AbnormalExit::Exit(i32::from(LOST_PEER_EXIT_CODE))
}

/// Returns the error at the end of a log after the byte `start`, or the last few lines, without control characters.
fn last_lines(path: &Path, start: u64) -> io::Result<Vec<String>> {
    const LINES_MAX: usize = 5;
    /// Maximum number of bytes that are shown.
    const BYTES_MAX: usize = 4096;
    /// Maximum number of bytes that are read. It is larger, because an error as a JSON object is one line.
    const BYTES_READ: u64 = 1 << 16;
    let mut file = open_regular(path)?;
    let len = file.metadata()?.len();
    let cut = len.saturating_sub(BYTES_READ);
    file.seek(SeekFrom::Start(start.max(cut)))?;
    let mut bytes = Vec::new();
    file.take(BYTES_READ).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    let messages: Vec<Cow<'_, str>> =
        text.lines().map(|line| message(line).map_or(line.into(), Cow::Owned)).collect();
    let mut text = messages.join("\n");
    let first = (text.len().saturating_sub(BYTES_MAX)..).find(|&index| text.is_char_boundary(index));
    text.drain(..first.expect("a text ends at the end of a character"));
    let printable = |line: &str| line.chars().filter(|c| !c.is_control()).collect::<String>();
    let lines: Vec<String> = text.lines().map(printable).filter(|line| !line.trim().is_empty()).collect();
    let error = lines.iter().rposition(|line| line.starts_with("error: "));
    Ok(lines[error.unwrap_or(lines.len().saturating_sub(LINES_MAX))..].to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader};
    use std::time::Duration;

    const ROLE: &str = "TRIREME_TEST_ROLE";

    /// Returns a command that runs this test program again, with only the test below and in another role.
    fn role(name: &str) -> Command {
        let (_crate_name, module) = module_path!().split_once("::").unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "--nocapture", &format!("{module}::a_worker_dies_with_its_launcher")]);
        command.env(ROLE, name);
        command
    }

    #[test]
    fn a_worker_dies_with_its_launcher() {
        match std::env::var(ROLE).as_deref() {
            Ok("launcher") => {
                let mut worker = role("worker");
                worker.env(LAUNCHER_VARIABLE, std::process::id().to_string());
                worker.spawn().unwrap().wait().unwrap();
            }
            Ok("worker") => {
                die_with_parent().unwrap();
                println!("ready");
                std::thread::sleep(Duration::from_secs(20));
                println!("survived");
            }
            Ok("orphan") => assert!(matches!(die_with_parent(), Err(LaunchError::LauncherGone))),
            _ => {
                let mut launcher = role("launcher").stdout(Stdio::piped()).spawn().unwrap();
                let mut printed = BufReader::new(launcher.stdout.take().unwrap()).lines().map(Result::unwrap);
                assert!(printed.any(|line| line.contains("ready")));
                launcher.kill().unwrap();
                launcher.wait().unwrap();
                // The worker holds the other end of the pipe: lines end when it does.
                assert!(!printed.any(|line| line.contains("survived")));

                let orphan = role("orphan").env(LAUNCHER_VARIABLE, "0").stdout(Stdio::null()).status();
                assert!(orphan.unwrap().success());
            }
        }
    }

    #[test]
    fn a_worker_that_cannot_be_killed_is_not_waited_for_but_named() {
        let folder = tempfile::tempdir().unwrap();
        let mut workers = WorkerProcesses::new();
        // No kill precedes the wait.
        workers
            .start(Rank(0), Command::new("sleep").arg("60").stdout(Stdio::null()), folder.path().join("log"))
            .unwrap();
        workers.wait(Instant::now()).unwrap();
        let text = workers.report(Rank(0), AbnormalExit::Exit(1), Vec::new()).to_string();
        assert!(text.contains("except rank 0, which does not respond to SIGKILL"), "{text}");
    }

    #[test]
    fn the_end_of_a_log_is_short_and_printable() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("rank-1.log");
        std::fs::write(&path, "old\n").unwrap();
        assert_eq!(last_lines(&path, 4).unwrap(), Vec::<String>::new());
        std::fs::write(&path, "old\n1\n2\n\n3\n\x1b[31m4\r\n5\n6").unwrap();
        assert_eq!(last_lines(&path, 4).unwrap(), ["2", "3", "[31m4", "5", "6"]);
        assert_eq!(last_lines(&path, 16).unwrap(), ["4", "5", "6"]);
        let error = ["error: all of", "  1", "  2", "  3", "  4", "  5", "  6"];
        std::fs::write(&path, format!("old\n1\n2\n{}\n", error.join("\n"))).unwrap();
        assert_eq!(last_lines(&path, 4).unwrap(), error);
        let object = serde_json::json!({ "rank": 1, "message": error.join("\n") });
        std::fs::write(&path, format!("old\n{{\"message\":\"1\"}}\n{object}\n")).unwrap();
        assert_eq!(last_lines(&path, 4).unwrap(), error);
        std::fs::write(&path, "x".repeat(1 << 20)).unwrap();
        assert_eq!(last_lines(&path, 0).unwrap(), ["x".repeat(4096)]);
        assert_eq!(last_lines(&path, 1 << 30).unwrap(), Vec::<String>::new());
    }
}
