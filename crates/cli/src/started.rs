//! When the command started: what `seconds_to_first_step` counts from.

use rustix::time::{ClockId, clock_gettime};
use std::time::{Duration, Instant};

/// Hands the launcher's start on to its workers: nanoseconds on the clock that counts from boot.
pub(crate) const STARTED_VARIABLE: &str = "TRIREME_STARTED";

/// Now, or the start of the launcher of this process. Called first in `main`; the process may be older: `cargo run` becomes the program.
pub(crate) fn command_started() -> Instant {
    let since_boot =
        std::env::var(STARTED_VARIABLE).ok().and_then(|text| text.parse().ok()).map(Duration::from_nanos);
    let elapsed = since_boot.map_or(Duration::ZERO, |start| now().saturating_sub(start));
    Instant::now().checked_sub(elapsed).unwrap_or_else(Instant::now)
}

/// `started` for [`STARTED_VARIABLE`].
pub(crate) fn to_variable(started: Instant) -> String {
    now().saturating_sub(started.elapsed()).as_nanos().to_string()
}

fn now() -> Duration {
    let time = clock_gettime(ClockId::Boottime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or_default())
}
