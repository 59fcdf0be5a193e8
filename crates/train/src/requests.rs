//! Requests of single ranks, which all ranks of a run receive at the end of a step.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The bit that requests a checkpoint. The bits from 1 to 30 stand for the signals with these numbers, and bit 0 for the time limit.
const CHECKPOINT: u32 = 1 << 31;
const TIME_LIMIT: u32 = 1;

/// The reason why a run ends before its last step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoppedBy {
    /// A signal to one of the ranks.
    Signal(i32),
    /// The time limit of the run.
    TimeLimit,
}

/// A handle for requests to all ranks of a run, from any thread of any rank. All ranks receive a request after the same step. The executors
/// exchange requests as [bits](trireme_parallel::Executor::requests).
#[derive(Debug, Clone)]
pub struct Requests(pub(crate) Arc<AtomicU32>);

impl Requests {
    /// Requests a checkpoint and the end of the run because of a signal.
    ///
    /// # Panics
    /// If the number of the signal is not from 1 to 30.
    pub fn stop(&self, signal: i32) {
        assert!((1..=30).contains(&signal), "signal {signal}");
        self.0.fetch_or(1 << signal, Ordering::Relaxed);
    }

    /// Requests a checkpoint and the end of the run because of the time limit.
    pub(crate) fn stop_at_time_limit(&self) {
        self.0.fetch_or(TIME_LIMIT, Ordering::Relaxed);
    }

    pub(crate) fn checkpoint(&self) {
        self.0.fetch_or(CHECKPOINT, Ordering::Relaxed);
    }

    pub(crate) fn clear_checkpoint(&self) {
        self.0.fetch_and(!CHECKPOINT, Ordering::Relaxed);
    }
}

/// The requests of all ranks at the end of a step, as bits.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RequestBits(pub(crate) u32);

impl RequestBits {
    pub(crate) fn checkpoint(self) -> bool {
        self.0 & CHECKPOINT != 0
    }

    /// Returns why the run should end. Of several signals, the one with the lowest number counts. Signals take precedence over the time
    /// limit.
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
    fn requests_are_distinguished() {
        let bits = Arc::new(AtomicU32::new(0));
        let requests = Requests(Arc::clone(&bits));
        let requested = || RequestBits(bits.load(Ordering::Relaxed));
        assert_eq!((requested().checkpoint(), requested().stop()), (false, None));
        requests.checkpoint();
        assert_eq!((requested().checkpoint(), requested().stop()), (true, None));
        requests.stop(15);
        requests.stop(2);
        requests.clear_checkpoint();
        assert_eq!((requested().checkpoint(), requested().stop()), (false, Some(StoppedBy::Signal(2))));
        requests.stop_at_time_limit();
        assert_eq!(requested().stop(), Some(StoppedBy::Signal(2)));
        assert_eq!(RequestBits(TIME_LIMIT | CHECKPOINT).stop(), Some(StoppedBy::TimeLimit));
    }
}
