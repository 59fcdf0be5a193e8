//! Writes reports and reports stalls on a separate thread, so that a file system that hangs holds up nothing else.

use super::RankReport;
use super::file::write_report;
use super::options::RecorderOptions;
use crate::CommError;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};
use trireme_base::{Rank, spawn_thread};

/// Maximum time that a rank waits for its report to be written.
const WRITE_MAX: Duration = Duration::from_secs(1);

/// A handle to the writing thread. Dropping it waits until everything is written, for at most 1 s.
pub(super) struct ReportWriter(Arc<Mailbox>);

struct Mailbox {
    state: Mutex<State>,
    /// Notified when a report or stall is added or done.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Lines about stalls that have not been passed to the listener.
    stalls: Vec<String>,
    /// The latest report that is not being written yet.
    report: Option<RankReport>,
    /// When the oldest pending item was added.
    pending_since: Option<Instant>,
    is_closed: bool,
}

impl ReportWriter {
    /// Starts the thread. Returns `None` if the options ask for neither files nor stall lines.
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

    /// Writes a report, in place of an earlier one that is still pending.
    pub(super) fn write(&self, report: RankReport) {
        self.0.hand_over(|state| state.report = Some(report));
    }

    pub(super) fn report_stall(&self, line: String) {
        self.0.hand_over(|state| state.stalls.push(line));
    }

    /// Blocks until everything pending is done, or the oldest pending item is 1 s old.
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
                stalls.iter().for_each(|line| listener.notify(line));
            }
            if let (Some(folder), Some(report)) = (&options.folder, report) {
                // Best effort, as the options document.
                let _ = write_report(folder, &report);
            }
            state = self.lock();
        }
    }
}
