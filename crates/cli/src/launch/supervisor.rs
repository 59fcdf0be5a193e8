//! Starts the workers of this host and supervises them until all have ended.

use super::LaunchError;
use super::joining::SECRET_VARIABLE;
use super::worker_processes::{WorkerProcesses, is_peer_loss};
use crate::diagnostics::print_diagnostic;
use crate::hang;
use crate::interrupts::{SecondSignal, is_urgent, stop_signals, stopping_notice};
use crate::process_state::AbnormalExit;
use crate::simd::Simd;
use crate::started::{STARTED_VARIABLE, to_variable};
use crate::timeout::run_with_timeout;
use rustix::process::Signal;
use signal_hook::consts::{SIGCHLD, SIGINT};
use signal_hook::iterator::Signals;
use std::io;
use std::net::TcpListener;
use std::path::Path;
use std::process::Command;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use trireme_base::{Rank, spawn_thread};
use trireme_comm::{Diagnosis, Occasion, RankReport, Secret, remove_reports};

/// Environment variable with the name by which the user has called this program.
pub(crate) const INVOKED_AS_VARIABLE: &str = "TRIREME_INVOKED_AS";

/// Maximum time to look for the cause after a worker has exited because it lost a peer: the end of that peer may be seen later.
const CAUSE_GRACE: Duration = Duration::from_secs(1);

/// Time that the remaining workers have to report their state after the death of one.
const REPORT_GRACE: Duration = Duration::from_millis(1500);

/// Interval at which these reports are read.
const REPORT_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Maximum time to read the reports from the file system.
const READ_TIMEOUT: Duration = Duration::from_secs(1);

/// Time that a worker has to end after SIGTERM.
const TERMINATE_GRACE: Duration = Duration::from_secs(2);

/// Time that the workers have to end by themselves after Ctrl-C, which reaches them as well.
const INTERRUPT_GRACE: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, Copy)]
pub(crate) struct LocalWorld<'a> {
    /// Number of workers, at least 1.
    pub(crate) num_workers: usize,
    /// TCP port at which the workers meet; 0 takes a free one.
    pub(crate) master_port: u16,
    /// Folder of `rank-k.log`, one for each worker. It must exist.
    pub(crate) log_folder: &'a Path,
    /// Folder of the reports that the workers' flight recorders write, if they do. It need not exist.
    pub(crate) recorder_folder: &'a Path,
    pub(crate) on_signal: OnSignal,
}

/// How a signal to the launcher ends its workers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OnSignal {
    /// The workers end.
    End,
    /// The workers receive SIGUSR1, save a checkpoint, and end by themselves. A second SIGINT, SIGTERM or SIGHUP ends them.
    Save,
}

/// Returns a function that creates commands for workers: this program with its own arguments. `started` is when this command started, and
/// `simd` the SIMD level of the workers' kernels, if they have any.
pub(crate) fn worker_command(started: Instant, simd: Option<&Simd>) -> io::Result<impl Fn() -> Command> {
    let (program, simd) = (std::env::current_exe()?, simd.map(Simd::variable));
    Ok(move || {
        let mut command = Command::new(&program);
        command.args(std::env::args_os().skip(1)).envs(simd.clone());
        command.envs(std::env::args_os().next().map(|name| (INVOKED_AS_VARIABLE, name)));
        command.env(STARTED_VARIABLE, to_variable(started));
        command
    })
}

/// Starts a worker for each rank with the command that `command` returns, and waits until all have ended.
///
/// The commands get torchrun's variables, and a secret that is generated for this world. The output of a worker goes to its log; the output
/// of rank 0 goes to the output of this process. If a worker dies, the cause is determined within 1 second. The other workers then receive
/// SIGTERM, and SIGKILL after 2 seconds. SIGINT, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 end the workers, too, at once or [after a
/// checkpoint](OnSignal). No worker is left when this returns, unless SIGKILL does not end it within 2 seconds, as on a file system that
/// hangs. The process should exit after this call, because these signals no longer end it.
///
/// After a death, the other workers have 1.5 seconds to report their state, which becomes part of the error. Reports that cannot be read
/// within 1 second are left out; then the death is printed at once, before any further wait.
///
/// Call it from the main thread: workers that call [`die_with_parent`](super::die_with_parent) end with the thread that has started them.
pub(crate) fn run_local_workers(
    world: LocalWorld<'_>,
    command: impl FnMut(Rank) -> Command,
) -> Result<(), LaunchError> {
    // Reports of an earlier run would be taken for reports of this run.
    remove_reports(world.recorder_folder)?;
    let (sender, signals) = channel();
    // Started before the first worker: no worker may end unseen, and no Ctrl-C may leave one behind.
    let _forwarder = SignalForwarder::start(sender)?;
    let workers = start_workers(world, command)?;
    Supervisor { world, workers, signals: &signals, print: &print_diagnostic }.until_all_have_ended()
}

fn start_workers(
    world: LocalWorld<'_>,
    mut command: impl FnMut(Rank) -> Command,
) -> Result<WorkerProcesses, LaunchError> {
    let port = master_port(world.master_port)
        .map_err(|source| LaunchError::Port { port: world.master_port, source })?;
    let secret = Secret::random()?;
    let mut workers = WorkerProcesses::new();
    for rank in (0..world.num_workers).map(Rank) {
        let mut command = command(rank);
        command
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", world.num_workers.to_string())
            .env("LOCAL_RANK", rank.to_string())
            .env("LOCAL_WORLD_SIZE", world.num_workers.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string())
            .env(SECRET_VARIABLE, secret.expose());
        workers.start(rank, &mut command, world.log_folder.join(format!("rank-{rank}.log")))?;
    }
    Ok(workers)
}

/// Returns the given port if it is free, or any free port for 0. Another process may take it before rank 0 binds it, which then fails with
/// an error.
fn master_port(port: u16) -> io::Result<u16> {
    Ok(TcpListener::bind(("127.0.0.1", port))?.local_addr()?.port())
}

struct Supervisor<'a> {
    world: LocalWorld<'a>,
    workers: WorkerProcesses,
    signals: &'a Receiver<i32>,
    print: &'a dyn Fn(&str),
}

impl Supervisor<'_> {
    fn until_all_have_ended(mut self) -> Result<(), LaunchError> {
        loop {
            self.workers.reap()?;
            if self.workers.stopped_by().is_some() {
                return self.end_after_stop(None);
            }
            match self.workers.first_death() {
                // Ctrl-C reaches the workers as well, and may end one before it is seen here.
                Some((_, AbnormalExit::Signal(SIGINT))) => return self.end_after_signal(SIGINT),
                Some((rank, death)) => return self.end_after_death(rank, death),
                None if !self.workers.are_running() => return self.end_after_stop(None),
                None => {}
            }
            match self.next_signal(None) {
                Some(SIGCHLD) | None => {}
                Some(signal) if self.world.on_signal == OnSignal::Save => {
                    (self.print)(&stopping_notice(signal));
                    self.workers.send(Signal::USR1);
                    return self.end_after_stop(Some(signal));
                }
                Some(signal) => return self.end_after_signal(signal),
            }
        }
    }

    /// Waits for workers that save a checkpoint, and ends them if one of them fails or a second signal comes. `asked` is the first signal
    /// that came to this process, if one did.
    ///
    /// A worker that is killed meanwhile is an error, unless the checkpoint is complete: then it is a warning.
    fn end_after_stop(mut self, asked: Option<i32>) -> Result<(), LaunchError> {
        let mut second = SecondSignal::new(false);
        if asked.is_some_and(is_urgent) {
            second.note(Instant::now());
        }
        // A suspended worker must continue to take part in the checkpoint.
        self.workers.send(Signal::CONT);
        loop {
            self.workers.reap()?;
            match (self.workers.stopped_by(), self.workers.first_death()) {
                (Some(signal), _) if !self.workers.are_running() => {
                    return Err(LaunchError::Stopped { signal: asked.unwrap_or(signal) });
                }
                (Some(_), _) | (None, None) if self.workers.are_running() => {}
                // If no worker stopped because of a signal, all had already finished their last step.
                (None, None) => {
                    let stopped_by = self.workers.first_stopped_by();
                    return stopped_by.map_or(Ok(()), |signal| {
                        Err(LaunchError::Stopped { signal: asked.unwrap_or(signal) })
                    });
                }
                // The request itself kills a worker that has not begun to train.
                (_, Some((_, AbnormalExit::Signal(signal)))) if stop_signals().contains(&signal) => {
                    return self.end_after_signal(asked.unwrap_or(SIGINT));
                }
                (_, Some((rank, death @ AbnormalExit::Signal(_)))) => {
                    // The others exit: because they have lost a peer, or because the checkpoint is complete on all ranks.
                    self.wait_for_all(CAUSE_GRACE)?;
                    let Some(signal) = self.workers.first_stopped_by() else {
                        return self.end_after_death(rank, death);
                    };
                    (self.print)(&format!("warning: rank {rank} {death} after the checkpoint was complete"));
                    self.end_workers()?;
                    return Err(LaunchError::Stopped { signal: asked.unwrap_or(signal) });
                }
                (_, Some((rank, death))) => return self.end_after_death(rank, death),
                (Some(_), None) => unreachable!("who has stopped has not exited with 0"),
            }
            let signal = self.next_signal(None).expect("without a deadline a signal comes");
            if signal != SIGCHLD && is_urgent(signal) && second.note(Instant::now()) {
                // The notice promises an end at once. The workers may not have received the second signal, and would save first.
                self.workers.kill()?;
                return Err(LaunchError::Interrupted { signal });
            }
        }
    }

    /// Returns the next signal; `None` after `deadline`.
    fn next_signal(&self, deadline: Option<Instant>) -> Option<i32> {
        let received = match deadline {
            Some(deadline) => self.signals.recv_timeout(deadline.saturating_duration_since(Instant::now())),
            None => self.signals.recv().map_err(RecvTimeoutError::from),
        };
        match received {
            Ok(signal) => Some(signal),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => panic!("signals are forwarded as long as workers run"),
        }
    }

    /// Finds the cause of a first death, ends the other workers, and returns the cause as an error.
    fn end_after_death(mut self, mut rank: Rank, mut death: AbnormalExit) -> Result<(), LaunchError> {
        let deadline = Instant::now() + CAUSE_GRACE;
        // A worker that exits because it lost a peer may be seen before that peer.
        while is_peer_loss(death) && self.workers.are_running() && self.next_signal(Some(deadline)).is_some()
        {
            self.workers.reap()?;
            (rank, death) = self.workers.first_death().expect("the dead stay dead");
        }
        let table = self.table(rank, death)?;
        self.end_workers()?;
        Err(self.workers.report(rank, death, table))
    }

    /// Returns the table of the workers' reports after the death of `rank`; empty if that worker exited for a reason of its own, which it
    /// has reported.
    fn table(&mut self, rank: Rank, death: AbnormalExit) -> Result<Vec<String>, LaunchError> {
        let deadline = Instant::now() + REPORT_GRACE;
        loop {
            let reports = match self.reports() {
                Ok(reports) => reports,
                Err(error) => {
                    // Printed at once, because ending workers that wait for this file system may take long.
                    let folder = self.world.recorder_folder.display();
                    (self.print)(&format!(
                        "warning: rank {rank} {death}; cannot tell what the workers last did, because {folder} cannot be \
                         read: {error}"
                    ));
                    return Ok(Vec::new());
                }
            };
            let has_not_failed = |rank: Rank| {
                reports.iter().any(|report| report.rank == rank.0 && report.occasion != Occasion::Failed)
            };
            let has_own_reason = matches!(death, AbnormalExit::Exit(_)) && has_not_failed(rank);
            if has_own_reason || !reports.iter().any(|report| report.rank == rank.0) {
                return Ok(Vec::new());
            }
            let is_over = Instant::now() >= deadline || !self.workers.active().any(has_not_failed);
            let next_look = Some(Instant::now() + REPORT_POLL_INTERVAL);
            if is_over || !matches!(self.next_signal(next_look), None | Some(SIGCHLD)) {
                return Ok(hang::lines(&Diagnosis::of(&reports), &self.workers.process_states()));
            }
            self.workers.reap()?;
        }
    }

    /// Returns the reports that exist, without unreadable ones.
    ///
    /// # Errors
    /// If the file system does not respond, or no thread can be started to read it.
    fn reports(&self) -> io::Result<Vec<RankReport>> {
        let (folder, num_workers) = (self.world.recorder_folder.to_owned(), self.world.num_workers);
        run_with_timeout(READ_TIMEOUT, move || {
            (0..num_workers).filter_map(|rank| RankReport::read(&folder, rank).ok()).collect()
        })
    }

    /// Ends the workers after a signal to this process, and returns the signal as an error.
    fn end_after_signal(mut self, signal: i32) -> Result<(), LaunchError> {
        if signal == SIGINT {
            self.wait_for_all(INTERRUPT_GRACE)?;
        }
        self.end_workers()?;
        Err(LaunchError::Interrupted { signal })
    }

    /// Ends all workers: first by SIGTERM, then by SIGKILL.
    fn end_workers(&mut self) -> Result<(), LaunchError> {
        self.workers.kill_suspended();
        self.workers.send(Signal::TERM);
        self.wait_for_all(TERMINATE_GRACE)?;
        Ok(self.workers.kill()?)
    }

    /// Waits until all workers have ended, for `grace` at most. A further stop signal ends the wait.
    fn wait_for_all(&mut self, grace: Duration) -> Result<(), LaunchError> {
        let deadline = Instant::now() + grace;
        self.workers.reap()?;
        while self.workers.are_running() && self.next_signal(Some(deadline)) == Some(SIGCHLD) {
            self.workers.reap()?;
        }
        Ok(())
    }
}

/// A thread that forwards SIGCHLD and the signals that end a run.
struct SignalForwarder {
    handle: signal_hook::iterator::Handle,
    thread: Option<JoinHandle<()>>,
}

impl SignalForwarder {
    fn start(sender: Sender<i32>) -> io::Result<Self> {
        let mut signals = Signals::new(stop_signals().into_iter().chain([SIGCHLD]))?;
        let handle = signals.handle();
        let forward =
            move || signals.forever().take_while(|signal| sender.send(*signal).is_ok()).for_each(drop);
        let thread = spawn_thread("signals", forward)?;
        Ok(SignalForwarder { handle, thread: Some(thread) })
    }
}

/// Returns the signals that this process ignores, signal `n` as bit `n - 1`; 0 if the system does not report them.
pub(crate) fn ignored_signals() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

impl Drop for SignalForwarder {
    fn drop(&mut self) {
        self.handle.close();
        if let Some(thread) = self.thread.take() {
            thread.join().expect("forwarding signals cannot panic");
        }
    }
}

#[cfg(test)]
#[path = "supervisor_tests.rs"]
mod tests;
