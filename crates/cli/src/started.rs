//! When the command started: what `seconds_to_first_step` counts from.

use rustix::time::{ClockId, clock_gettime};
use std::time::{Duration, Instant};

/// Hands the launcher's start on to its workers: nanoseconds on the clock that counts from boot.
pub(crate) const STARTED_VARIABLE: &str = "TRIREME_STARTED";

/// Start of this process, or of the launcher that started it.
pub(crate) fn command_started() -> Instant {
    let since_boot = std::env::var(STARTED_VARIABLE)
        .ok()
        .and_then(|text| text.parse().ok())
        .map(Duration::from_nanos)
        .or_else(process_start);
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

/// When the kernel made this process, to a hundredth of a second: before the binary was even loaded.
fn process_start() -> Option<Duration> {
    let stat = std::fs::read_to_string("/proc/self/stat").ok()?;
    // The name, in parentheses, may hold anything; `starttime` is field 22, the 20th after it.
    let ticks: u64 = stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()?;
    Some(Duration::from_secs_f64(ticks as f64 / rustix::param::clock_ticks_per_second() as f64))
}
