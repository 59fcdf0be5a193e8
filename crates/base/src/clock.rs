use std::time::{Duration, Instant};

/// Where code asks for the time, so that tests and simulators can give their own.
pub trait Clock: Send + Sync {
    /// Time since an arbitrary but fixed origin; never goes back.
    fn now(&self) -> Duration;
}

/// The machine's monotonic clock, counted from the value's creation.
#[derive(Debug, Clone)]
pub struct SystemClock {
    origin: Instant,
}

impl SystemClock {
    /// A clock whose origin is now.
    pub fn new() -> Self {
        SystemClock { origin: Instant::now() }
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        SystemClock::new()
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.origin.elapsed()
    }
}
