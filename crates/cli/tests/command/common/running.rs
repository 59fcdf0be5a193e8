use super::Outcome;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Far above the time that anything here takes on a busy machine. It ends a test that would otherwise wait for ever.
const TEST_TIMEOUT: Duration = Duration::from_secs(60);

/// Time in which a run must end after the death of a worker.
const DEATH_TO_END: Duration = Duration::from_secs(5);

/// A running command. It does not outlive this value.
pub(crate) struct Running {
    child: Child,
    lines: Receiver<String>,
    printed: String,
    stderr: JoinHandle<String>,
    workers: Vec<i32>,
}

impl Running {
    /// Starts a command in its own process group, which is what Ctrl-C on a terminal reaches.
    pub(crate) fn start(mut command: Command) -> Self {
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
        let mut child = command.spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let mut stderr = child.stderr.take().unwrap();
        let (sender, lines) = channel();
        thread::spawn(move || {
            let text = |line: Vec<u8>| String::from_utf8_lossy(&line).into_owned();
            stdout.split(b'\n').map_while(Result::ok).all(|line| sender.send(text(line)).is_ok())
        });
        let stderr = thread::spawn(move || {
            let mut bytes = Vec::new();
            stderr.read_to_end(&mut bytes).unwrap();
            String::from_utf8_lossy(&bytes).into_owned()
        });
        Running { child, lines, printed: String::new(), stderr, workers: Vec::new() }
    }

    /// Reads the output until a line begins with `start`.
    pub(crate) fn until(&mut self, start: &str) {
        loop {
            let line = self.lines.recv_timeout(TEST_TIMEOUT);
            let line = line.unwrap_or_else(|_| panic!("no line '{start}' after:\n{}", self.printed));
            self.printed += &format!("{line}\n");
            if line.starts_with(start) {
                return;
            }
        }
    }

    /// Reads the output until the command has printed nothing for `duration` while it still runs.
    pub(crate) fn until_silent_for(&mut self, duration: Duration) {
        loop {
            match self.lines.recv_timeout(duration) {
                Ok(line) => self.printed += &format!("{line}\n"),
                Err(RecvTimeoutError::Timeout) => return,
                Err(RecvTimeoutError::Disconnected) => panic!("ended after:\n{}", self.printed),
            }
        }
    }

    /// Waits until the command has started the worker `rank`, and returns the worker's process id.
    pub(crate) fn worker(&mut self, rank: usize) -> Pid {
        let launcher = self.child.id().to_string();
        let mark = format!("RANK={rank}");
        let id = poll(|| {
            let processes = std::fs::read_dir("/proc").unwrap().filter_map(Result::ok);
            let mut ids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
            ids.find(|id| parent(*id).as_deref() == Some(&launcher) && has_variable(*id, &mark))
        });
        self.workers.push(id);
        Pid::from_raw(id).unwrap()
    }

    /// Records the workers of a world of two, which must be gone in the end.
    pub(crate) fn watch_workers(&mut self) {
        self.worker(0);
        self.worker(1);
    }

    pub(crate) fn process(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Sends SIGINT to the command and all processes that it has started, as a terminal does.
    pub(crate) fn interrupt(&self) {
        kill_process_group(self.process(), Signal::INT).unwrap();
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    pub(crate) fn end(self) -> Outcome {
        self.end_within(TEST_TIMEOUT)
    }

    /// Waits for the command to end, which must happen soon after the death of a worker.
    pub(crate) fn end_after_death(self) -> Outcome {
        self.end_within(DEATH_TO_END)
    }

    fn end_within(mut self, timeout: Duration) -> Outcome {
        let deadline = Instant::now() + timeout;
        // The output ends when the last of the command's processes does.
        while let Ok(line) = self.lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            self.printed += &format!("{line}\n");
        }
        assert!(Instant::now() < deadline, "still running after {timeout:?}:\n{}", self.printed);
        let status = self.child.wait().unwrap();
        // A worker whose launcher was killed dies a moment after it.
        poll(|| self.workers.iter().all(|worker| !is_alive(*worker)).then_some(()));
        let stderr = std::mem::replace(&mut self.stderr, thread::spawn(String::new)).join().unwrap();
        Outcome { code: status.code(), stdout: std::mem::take(&mut self.printed), stderr }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // After a regular end there is no process left to kill. Workers die with their launcher.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Kills a process with SIGKILL.
pub(crate) fn kill(process: Pid) {
    kill_process(process, Signal::KILL).unwrap();
}

/// Calls `look` until it returns a value.
pub(crate) fn poll<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + TEST_TIMEOUT;
    let (_sender, nothing) = channel::<()>();
    loop {
        if let Some(seen) = look() {
            return seen;
        }
        assert!(Instant::now() < deadline, "nothing to see for {TEST_TIMEOUT:?}");
        let _ = nothing.recv_timeout(Duration::from_millis(1));
    }
}

/// Returns the fields of a process after its name in `/proc/PID/stat`: its state, its parent and the rest.
fn status(id: i32) -> Option<Vec<String>> {
    let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    // The name of the process, in parentheses, may contain anything.
    Some(stat.rsplit_once(')')?.1.split_whitespace().map(str::to_owned).collect())
}

fn parent(id: i32) -> Option<String> {
    status(id)?.into_iter().nth(1)
}

/// Whether the process exists and is not a zombie.
fn is_alive(id: i32) -> bool {
    status(id).is_some_and(|status| status[0] != "Z")
}

fn has_variable(id: i32, variable: &str) -> bool {
    let environment = std::fs::read(format!("/proc/{id}/environ")).unwrap_or_default();
    environment.split(|byte| *byte == 0).any(|entry| entry == variable.as_bytes())
}
