//! How long to wait.

use std::io;
use std::time::{Duration, Instant};

/// How often to look whether a wait has become pointless.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);

/// Until when to wait, and what makes the wait pointless before.
#[derive(Clone, Copy)]
pub(super) struct WaitLimit<'a> {
    pub(super) deadline: Instant,
    failure: Option<&'a dyn Fn() -> Option<io::Error>>,
}

impl<'a> WaitLimit<'a> {
    /// Waits until `deadline`, unless there is a `failure`.
    pub(super) fn unless(deadline: Instant, failure: &'a dyn Fn() -> Option<io::Error>) -> Self {
        WaitLimit { deadline, failure: Some(failure) }
    }

    /// How long to wait at once.
    pub(super) fn next_look(&self) -> Instant {
        match self.failure {
            Some(_) => self.deadline.min(Instant::now() + LOOK_INTERVAL),
            None => self.deadline,
        }
    }

    /// # Errors
    /// `TimedOut` after the deadline; the failure.
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

/// A rank stops connecting because another one has failed.
#[derive(Debug, thiserror::Error)]
#[error("another rank has failed")]
pub(super) struct AnotherFailed;
