//! Dates and times.

use chrono::{DateTime, Utc};
use std::time::UNIX_EPOCH;

/// The last second of the year 9999.
const SECONDS_MAX: u64 = 253_402_300_799;

/// Formats a Unix timestamp for people, such as `2023-11-14 22:13:20 UTC`. `None` beyond the year 9999.
pub(crate) fn date_and_time(unix_seconds: u64) -> Option<String> {
    Some(moment(unix_seconds)?.format("%F %T UTC").to_string())
}

/// Returns the current date and time in RFC 3339.
pub(crate) fn now() -> String {
    let seconds = UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs());
    moment(seconds).map_or_else(String::new, |moment| moment.format("%FT%TZ").to_string())
}

fn moment(unix_seconds: u64) -> Option<DateTime<Utc>> {
    if unix_seconds > SECONDS_MAX {
        return None;
    }
    DateTime::from_timestamp(unix_seconds as i64, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_dates() {
        for (seconds, date) in [
            (0, "1970-01-01 00:00:00 UTC"),
            (951_782_399, "2000-02-28 23:59:59 UTC"),
            (951_782_400, "2000-02-29 00:00:00 UTC"),
            (1_700_000_000, "2023-11-14 22:13:20 UTC"),
            (4_107_542_400, "2100-03-01 00:00:00 UTC"),
            (SECONDS_MAX, "9999-12-31 23:59:59 UTC"),
        ] {
            assert_eq!(date_and_time(seconds).as_deref(), Some(date));
        }
        assert_eq!(date_and_time(u64::MAX), None);
    }

    #[test]
    fn now_is_a_date_and_a_time() {
        let now = now();
        let shape: String = now.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
        assert_eq!(shape, "0000-00-00T00:00:00Z");
    }
}
