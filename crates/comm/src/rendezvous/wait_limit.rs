//! Deadlines of waits that a failure ends early.

use std::io;
use std::time::{Duration, Instant};

/// How often a wait checks for a failure.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// A deadline, and a check for a failure that ends the wait early.
#[derive(Clone, Copy)]
pub(super) struct WaitLimit<'a> {
    pub(super) deadline: Instant,
    failure: Option<&'a dyn Fn() -> Option<io::Error>>,
}

impl<'a> WaitLimit<'a> {
    /// A limit that ends at `deadline`, or as soon as `failure` returns an error.
    pub(super) fn unless(deadline: Instant, failure: &'a dyn Fn() -> Option<io::Error>) -> Self {
        WaitLimit { deadline, failure: Some(failure) }
    }

    /// The time until which to wait before the next [`check`](Self::check).
    pub(super) fn next_check(&self) -> Instant {
        match self.failure {
            Some(_) => self.deadline.min(Instant::now() + CHECK_INTERVAL),
            None => self.deadline,
        }
    }

    /// Checks for the failure and the deadline.
    ///
    /// # Errors
    /// The failure; `TimedOut` after the deadline.
    pub(super) fn check(&self) -> io::Result<()> {
        if let Some(failure) = self.failure.and_then(|failure| failure()) {
            return Err(failure);
        }
        if Instant::now() >= self.deadline { Err(io::ErrorKind::TimedOut.into()) } else { Ok(()) }
    }
}

impl From<Instant> for WaitLimit<'_> {
    fn from(deadline: Instant) -> Self {
        WaitLimit { deadline, failure: None }
    }
}

/// The error of a rank that stops connecting because another one has failed.
#[derive(Debug, thiserror::Error)]
#[error("another rank has failed")]
pub(super) struct AnotherFailed;
