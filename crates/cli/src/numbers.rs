//! Numbers as text for people; sizes are [`Bytes`](trireme_base::Bytes).

use std::time::Duration;

/// Formats a duration, such as `2d03h`, `5h07m`, `1m05s` or `9s`.
pub(crate) fn duration(time: Duration) -> String {
    let seconds = time.as_secs();
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m{:02}s", seconds % 60),
        (0, _, _) => format!("{hours}h{:02}m", minutes % 60),
        _ => format!("{days}d{:02}h", hours % 24),
    }
}

/// Formats a number with a comma between groups of three digits.
pub(crate) fn with_thousands_separators(number: u64) -> String {
    match number {
        0..1000 => number.to_string(),
        _ => format!("{},{:03}", with_thousands_separators(number / 1000), number % 1000),
    }
}

/// Parses a size such as `4096`, `48K` or `1M` to bytes.
pub(crate) fn size_with_unit(text: &str) -> Option<u64> {
    let (digits, unit) = match text.split_at_checked(text.len().checked_sub(1)?)? {
        (digits, "K") => (digits, 1 << 10),
        (digits, "M") => (digits, 1 << 20),
        (digits, "G") => (digits, 1 << 30),
        _ => (text, 1),
    };
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

/// Formats a number with its noun, such as `1 question` and `2 questions`.
pub(crate) fn with_noun(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_are_grouped() {
        assert_eq!(
            [0, 999, 1000, 3_475_712].map(with_thousands_separators),
            ["0", "999", "1,000", "3,475,712"]
        );
    }

    #[test]
    fn one_is_singular() {
        assert_eq!([0, 1, 2].map(|number| with_noun(number, "step")), ["0 steps", "1 step", "2 steps"]);
    }

    #[test]
    fn durations_have_two_units_at_most() {
        let show = |seconds| duration(Duration::from_secs(seconds));
        assert_eq!([9, 65, 7260, 100_000].map(show), ["9s", "1m05s", "2h01m", "1d03h"]);
    }
}
