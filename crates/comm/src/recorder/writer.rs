//! Writes reports and tells of stalls on a thread of its own: a file system that hangs holds up nothing else.

use super::RankReport;
use super::file::write_report;
use super::options::RecorderOptions;
use crate::CommError;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use trireme_base::{Rank, spawn_thread};

/// How long a rank waits for its report to be written before it carries on without.
const WRITE_MAX: Duration = Duration::from_secs(1);

/// The other end of the writing thread. When it is dropped, it waits until everything is written, 1 s at most.
pub(super) struct ReportWriter(Arc<Mailbox>);

struct Mailbox {
    state: Mutex<State>,
    /// Something was handed over or is done.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Stalls that nobody has been told of.
    stalls: Vec<String>,
    /// The newest report, until it is being written.
    report: Option<RankReport>,
    /// When the oldest of the things that are not done was handed over.
    pending_since: Option<Instant>,
    is_closed: bool,
}

impl ReportWriter {
    /// Starts the thread; `None` if there is nothing for it to do.
    pub(super) fn start(rank: Rank, options: &RecorderOptions) -> Result<Option<Self>, CommError> {
        if options.folder.is_none() && options.on_stall.is_none() {
            return Ok(None);
        }
        let mailbox = Arc::new(Mailbox { state: Mutex::default(), changed: Condvar::new() });
        let (served, options) = (Arc::clone(&mailbox), options.clone());
        spawn_thread(&format!("reports-{rank}"), move || served.serve(&options))
            .map_err(|source| CommError::Spawn { source: Arc::new(source) })?;
        Ok(Some(ReportWriter(mailbox)))
    }

    /// Has a report written, in place of an earlier one that still waits.
    pub(super) fn write(&self, report: RankReport) {
        self.0.hand_over(|state| state.report = Some(report));
    }

    pub(super) fn tell_of_stall(&self, line: String) {
        self.0.hand_over(|state| state.stalls.push(line));
    }

    /// Waits until everything that was handed over is done, or the oldest of it is 1 s old.
    pub(super) fn flush(&self) {
        let mut state = self.0.lock();
        while let Some(left) = state.pending_since.and_then(|since| WRITE_MAX.checked_sub(since.elapsed())) {
            let waited = self.0.changed.wait_timeout(state, left);
            state = waited.expect("no thread panics while it holds the mailbox").0;
        }
    }
}

impl Drop for ReportWriter {
    fn drop(&mut self) {
        self.0.lock().is_closed = true;
        self.0.changed.notify_all();
        self.flush();
    }
}

impl Mailbox {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread panics while it holds the mailbox")
    }

    fn hand_over(&self, put: impl FnOnce(&mut State)) {
        let mut state = self.lock();
        put(&mut state);
        state.pending_since.get_or_insert_with(Instant::now);
        self.changed.notify_all();
    }

    fn serve(&self, options: &RecorderOptions) {
        let mut state = self.lock();
        loop {
            let (stalls, report) = (std::mem::take(&mut state.stalls), state.report.take());
            if stalls.is_empty() && report.is_none() {
                state.pending_since = None;
                self.changed.notify_all();
                if state.is_closed {
                    return;
                }
                state = self.changed.wait(state).expect("no thread panics while it holds the mailbox");
                continue;
            }
            drop(state);
            if let Some(listener) = &options.on_stall {
                stalls.iter().for_each(|line| listener.tell(line));
            }
            if let (Some(folder), Some(report)) = (&options.folder, report) {
                // Best effort, as the options say.
                let _ = write_report(folder, &report);
            }
            state = self.lock();
        }
    }
}
