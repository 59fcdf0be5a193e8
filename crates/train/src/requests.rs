//! What a rank can ask all ranks of a run for at the end of a step.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The bit that asks for a checkpoint; those below stand for signals, whose numbers begin at 1, and the first for the time limit.
const CHECKPOINT: u32 = 1 << 31;
const TIME_LIMIT: u32 = 1;

/// Why a run ends before its last step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoppedBy {
    /// A signal to any of its ranks.
    Signal(i32),
    /// The time that it was given is over.
    TimeLimit,
}

/// Asks all ranks of a run for something, from any thread of any of them. They hear of it together, at the end of a step.
/// The requests travel in these [bits](trireme_parallel::Executor::requests).
#[derive(Debug, Clone)]
pub struct Requests(pub(crate) Arc<AtomicU32>);

impl Requests {
    /// Asks for a checkpoint and the end of the run, because of a signal.
    ///
    /// # Panics
    /// If there is no such signal: its number is from 1 to 30.
    pub fn stop(&self, signal: i32) {
        assert!((1..=30).contains(&signal), "signal {signal}");
        self.0.fetch_or(1 << signal, Ordering::Relaxed);
    }

    /// Asks for a checkpoint and the end of the run, because its time is over.
    pub(crate) fn stop_in_time(&self) {
        self.0.fetch_or(TIME_LIMIT, Ordering::Relaxed);
    }

    pub(crate) fn checkpoint(&self) {
        self.0.fetch_or(CHECKPOINT, Ordering::Relaxed);
    }

    pub(crate) fn forget_checkpoint(&self) {
        self.0.fetch_and(!CHECKPOINT, Ordering::Relaxed);
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Requested(pub(crate) u32);

impl Requested {
    pub(crate) fn checkpoint(self) -> bool {
        self.0 & CHECKPOINT != 0
    }

    /// Why the run shall end: of several signals, the first by number; if none has come, because its time is over.
    pub(crate) fn stop(self) -> Option<StoppedBy> {
        match (self.0 & !CHECKPOINT & !TIME_LIMIT).trailing_zeros() {
            32 => (self.0 & TIME_LIMIT != 0).then_some(StoppedBy::TimeLimit),
            signal => Some(StoppedBy::Signal(signal as i32)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_told_apart() {
        let bits = Arc::new(AtomicU32::new(0));
        let requests = Requests(Arc::clone(&bits));
        let requested = || Requested(bits.load(Ordering::Relaxed));
        assert_eq!((requested().checkpoint(), requested().stop()), (false, None));
        requests.checkpoint();
        assert_eq!((requested().checkpoint(), requested().stop()), (true, None));
        requests.stop(15);
        requests.stop(2);
        requests.forget_checkpoint();
        assert_eq!((requested().checkpoint(), requested().stop()), (false, Some(StoppedBy::Signal(2))));
        requests.stop_in_time();
        assert_eq!(requested().stop(), Some(StoppedBy::Signal(2)));
        assert_eq!(Requested(TIME_LIMIT | CHECKPOINT).stop(), Some(StoppedBy::TimeLimit));
    }
}
