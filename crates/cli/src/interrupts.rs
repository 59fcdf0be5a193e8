//! Signals that ask a run to save a checkpoint and end.
//!
//! Every process of a run handles signals. The launcher sends its workers SIGUSR1. A worker sets the bit of the signal in [`Requests`], and
//! the bits of all ranks are gathered with the losses of the step. All ranks therefore stop after the same step, save a checkpoint, and end
//! with 128 plus the number of the signal. A second urgent signal ends the process at once.

use crate::diagnostics::print_diagnostic;
use crate::launch::ignored_signals;
use crate::process_state::signal_name;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2};
use signal_hook::flag::register_conditional_shutdown;
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};
use trireme_base::spawn_thread;
use trireme_train::Requests;

/// Time in which urgent signals to a worker count as one: a terminal signals every process, and a launcher such as `srun` may
/// forward the signal in addition.
const DUPLICATE_WINDOW_OF_WORKER: Duration = Duration::from_millis(500);

/// The same for a process without a launcher: programs such as `timeout` signal a process and then its group.
const DUPLICATE_WINDOW: Duration = Duration::from_millis(100);

/// Returns the signals that end a run. Signals that the parent ignores are handled too, except SIGHUP, so that `nohup` works.
pub(crate) fn stop_signals() -> Vec<i32> {
    let is_hangup_ignored = ignored_signals() & 1 << (SIGHUP - 1) != 0;
    let signals = [SIGINT, SIGTERM, SIGUSR1, SIGUSR2].into_iter();
    signals.chain((!is_hangup_ignored).then_some(SIGHUP)).collect()
}

/// Whether a second signal such as this one ends the run at once.
pub(crate) fn is_urgent(signal: i32) -> bool {
    ![SIGUSR1, SIGUSR2].contains(&signal)
}

/// Distinguishes a second urgent signal from duplicates of the first one.
#[derive(Debug)]
pub(crate) struct SecondSignal {
    first: Option<Instant>,
    window: Duration,
}

impl SecondSignal {
    /// Creates a detector that has seen no signal. `is_worker` says whether a launcher may forward signals to this process.
    pub(crate) fn new(is_worker: bool) -> Self {
        let window = if is_worker { DUPLICATE_WINDOW_OF_WORKER } else { DUPLICATE_WINDOW };
        SecondSignal { first: None, window }
    }

    /// Records an urgent signal that arrived at `now`. Returns whether it is the second one.
    pub(crate) fn note(&mut self, now: Instant) -> bool {
        let first = *self.first.get_or_insert(now);
        now.duration_since(first) > self.window
    }
}

/// Returns the message of a training process that is asked to end.
pub(crate) fn stopping_notice(signal: i32) -> String {
    format!(
        "{}: the run ends after this step; send another SIGINT or SIGTERM to end it at once, without a checkpoint",
        signal_name(signal)
    )
}

/// Whether no handlers are installed yet.
static UNHANDLED: LazyLock<Arc<AtomicBool>> = LazyLock::new(|| Arc::new(AtomicBool::new(true)));

/// Lets signals end this process if it is the first process of a container, for which the kernel drops unhandled signals
/// (pid_namespaces(7)).
pub(crate) fn end_as_first_process() -> io::Result<()> {
    if std::process::id() != 1 {
        return Ok(());
    }
    stop_signals().into_iter().try_for_each(|signal| {
        register_conditional_shutdown(signal, 128 + signal, Arc::clone(&UNHANDLED)).map(drop)
    })
}

#[derive(Debug, Clone)]
pub(crate) struct Interrupts(Arc<Mutex<Option<Requests>>>);

impl Interrupts {
    /// Installs the handlers. Before a run [begins](Interrupts::forward_to), and after it has ended, signals end the process. `reports`
    /// says whether the first signal is reported, `is_worker` whether a launcher may forward signals to this process.
    pub(crate) fn listen(reports: bool, is_worker: bool) -> io::Result<Self> {
        let mut signals = Signals::new(stop_signals())?;
        UNHANDLED.store(false, Ordering::SeqCst);
        let interrupts = Interrupts(Arc::default());
        let Interrupts(run) = interrupts.clone();
        let mut second = SecondSignal::new(is_worker);
        let mut is_first = true;
        let mut handle = move |signal: i32| {
            // The lock is held while the process ends, so that no run ends by itself meanwhile.
            let run = run.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(requests) = &*run else { return end(signal) };
            if is_urgent(signal) && second.note(Instant::now()) {
                return end(signal);
            }
            if std::mem::take(&mut is_first) && reports {
                print_diagnostic(&stopping_notice(signal));
            }
            requests.stop(signal);
        };
        // The thread ends with the process: without it, signals would be lost.
        let listen = move || signals.forever().for_each(&mut handle);
        spawn_thread("signals", listen)?;
        Ok(interrupts)
    }

    /// Makes signals ask a run to end, until the returned guard is dropped.
    pub(crate) fn forward_to(&self, requests: Requests) -> impl Drop + use<> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(requests);
        Guard(self.clone())
    }
}

struct Guard(Interrupts);

impl Drop for Guard {
    fn drop(&mut self) {
        *self.0.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }
}

/// Ends this process as the signal does by default.
fn end(signal: i32) {
    // All of these signals end a process, except the first process of a container.
    if std::process::id() != 1 {
        let _ = emulate_default_handler(signal);
    }
    std::process::exit(128 + signal);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forwarded_signal_is_not_a_second_one() {
        let (mut second, start) = (SecondSignal::new(true), Instant::now());
        let after = |milliseconds| start + Duration::from_millis(milliseconds);
        let is_second = [0, 10, 400, 600].map(|milliseconds| second.note(after(milliseconds)));
        assert_eq!(is_second, [false, false, false, true]);
        let mut second = SecondSignal::new(false);
        assert_eq!([0, 10, 300].map(|milliseconds| second.note(after(milliseconds))), [false, false, true]);
    }
}
