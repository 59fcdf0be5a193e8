//! The start of the command, from which `seconds_to_first_step` counts.

use rustix::time::{ClockId, clock_gettime};
use std::time::{Duration, Instant};

/// Environment variable that passes the launcher's start to its workers, in nanoseconds since boot.
pub(crate) const STARTED_VARIABLE: &str = "TRIREME_STARTED";

/// Returns when this command started, or when the launcher of this process started. Call it first in `main`. The start time of the process
/// is not used: `cargo run` replaces itself with the program, so that time would include the build.
pub(crate) fn command_started() -> Instant {
    let since_boot =
        std::env::var(STARTED_VARIABLE).ok().and_then(|text| text.parse().ok()).map(Duration::from_nanos);
    let elapsed = since_boot.map_or(Duration::ZERO, |start| now().saturating_sub(start));
    Instant::now().checked_sub(elapsed).unwrap_or_else(Instant::now)
}

/// Encodes `started` for [`STARTED_VARIABLE`].
pub(crate) fn to_variable(started: Instant) -> String {
    now().saturating_sub(started.elapsed()).as_nanos().to_string()
}

fn now() -> Duration {
    let time = clock_gettime(ClockId::Boottime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or_default())
}
