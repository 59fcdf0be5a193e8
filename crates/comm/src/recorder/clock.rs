//! Conversion of monotonic times to wall-clock times.

use std::time::{Instant, SystemTime};

/// Converts instants to seconds since 1970, relative to one reading of both clocks.
pub(super) struct Clock {
    now: Instant,
    pub(super) unix_now: f64,
}

impl Clock {
    pub(super) fn now() -> Self {
        let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        Clock { now: Instant::now(), unix_now: unix.as_secs_f64() }
    }

    pub(super) fn unix(&self, at: Instant) -> f64 {
        self.unix_now - self.now.saturating_duration_since(at).as_secs_f64()
    }
}
