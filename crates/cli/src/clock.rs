//! Dates and times.

use std::time::UNIX_EPOCH;

/// The last second of the year 9999.
const SECONDS_MAX: u64 = 253_402_300_799;

/// The date and time that is so many seconds after 1970 began, as people read it; none beyond the year 9999.
pub(crate) fn date_and_time(unix_seconds: u64) -> Option<String> {
    let (date, time) = parts(unix_seconds)?;
    Some(format!("{date} {time} UTC"))
}

/// The date and time of now, as programs read it (RFC 3339).
pub(crate) fn now() -> String {
    let seconds = UNIX_EPOCH.elapsed().map_or(0, |since| since.as_secs());
    parts(seconds).map_or_else(String::new, |(date, time)| format!("{date}T{time}Z"))
}

fn parts(unix_seconds: u64) -> Option<(String, String)> {
    if unix_seconds > SECONDS_MAX {
        return None;
    }
    let (days, seconds) = (unix_seconds / 86_400, unix_seconds % 86_400);
    // Howard Hinnant, "chrono-compatible low-level date algorithms": years begin in March, in eras of 400; leap days are their last.
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    Some((format!("{year}-{month:02}-{day:02}"), format!("{hour:02}:{minute:02}:{second:02}")))
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
