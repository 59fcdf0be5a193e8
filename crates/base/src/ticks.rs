//! Round tick values for the axes of charts.

/// The range of a chart's axis, with its ticks and their labels.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Ticks {
    /// The lower end of the axis.
    pub low: f64,
    /// The upper end of the axis.
    pub high: f64,
    interval: f64,
}

impl Ticks {
    /// Returns an axis that contains the values from `low` to `high` and begins and ends at a tick. It has at most `num_intervals + 2`
    /// intervals. If `low` is above `high`, the axis spans 0 to 1.
    pub fn around(low: f64, high: f64, num_intervals: usize) -> Self {
        let (low, high) = widened(low, high);
        let interval = round_up((high - low) / num_intervals as f64);
        let low = (low / interval).floor() * interval;
        Ticks { low, high: (high / interval).ceil() * interval, interval }
    }

    /// Returns an axis of training steps from 0 to `last_step` (at least 1), with ticks at whole steps. It has at most `num_intervals`
    /// intervals.
    pub fn of_steps(last_step: u64, num_intervals: usize) -> Self {
        let last_step = last_step.max(1) as f64;
        let interval = round_up(last_step / num_intervals as f64).max(1.0);
        Ticks { low: 0.0, high: last_step, interval }
    }

    /// Returns the ticks in ascending order.
    pub fn values(self) -> impl Iterator<Item = f64> {
        // The tolerance keeps a tick at the upper end in spite of rounding.
        let num_intervals = ((self.high - self.low) / self.interval + 1e-6).floor() as usize;
        // Adding zero turns a negative zero into a positive one.
        (0..=num_intervals).map(move |index| self.low + self.interval * index as f64 + 0.0)
    }

    /// Returns the position of `value` along the axis: 0 at the lower end, 1 at the upper end.
    pub fn fraction(self, value: f64) -> f64 {
        (value - self.low) / (self.high - self.low)
    }

    /// Formats a tick with as many digits as distinguish it from its neighbors.
    pub fn label(self, value: f64) -> String {
        let largest = self.low.abs().max(self.high.abs());
        if value == 0.0 {
            return "0".to_owned();
        }
        if largest >= 1e13 || self.interval < 9e-5 {
            let digits = floor_log10(value.abs()) - floor_log10(self.interval);
            return format!("{value:.*e}", digits.max(0) as usize);
        }
        let (scale, suffix) = match largest {
            1e9.. => (1e9, "G"),
            1e6.. => (1e6, "M"),
            1e4.. => (1e3, "k"),
            _ => (1.0, ""),
        };
        let decimals = -floor_log10(self.interval / scale);
        format!("{:.*}{suffix}", decimals.max(0) as usize, value / scale)
    }
}

/// Widens a range that is too narrow to divide into intervals. Returns `(0, 1)` if `low` is above `high`.
fn widened(low: f64, high: f64) -> (f64, f64) {
    if low > high {
        return (0.0, 1.0);
    }
    let largest = low.abs().max(high.abs());
    if high - low > 1e-9 * largest {
        return (low, high);
    }
    let margin = if largest == 0.0 { 0.5 } else { 0.1 * largest };
    (low - margin, high + margin)
}

/// Returns the exponent of the largest power of ten that is at most `value`, which must be positive.
fn floor_log10(value: f64) -> i32 {
    // The computed logarithm of a power of ten may be slightly too low.
    (value.log10() + 1e-9).floor() as i32
}

/// Returns the smallest number that is at least `value` and is 1, 2, 5 or 10 times a power of ten.
fn round_up(value: f64) -> f64 {
    let power = 10.0_f64.powf(value.log10().floor());
    [1.0, 2.0, 5.0, 10.0]
        .map(|factor| factor * power)
        .into_iter()
        .find(|&round| round >= value)
        .unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(ticks: Ticks) -> Vec<String> {
        ticks.values().map(|value| ticks.label(value)).collect()
    }

    #[test]
    fn ticks_are_round_numbers() {
        assert_eq!([0.3, 1.0, 3.0, 70.0, 125.0].map(round_up), [0.5, 1.0, 5.0, 100.0, 200.0]);
        assert_eq!(labels(Ticks::around(2.88, 5.46, 6)), ["2.5", "3.0", "3.5", "4.0", "4.5", "5.0", "5.5"]);
        assert_eq!(labels(Ticks::of_steps(60, 8)), ["0", "10", "20", "30", "40", "50", "60"]);
        assert_eq!(labels(Ticks::of_steps(3, 8)), ["0", "1", "2", "3"]);
    }

    #[test]
    fn labels_are_short_and_no_two_are_the_same() {
        assert_eq!(labels(Ticks::around(1.71, 1.79, 6)), ["1.70", "1.72", "1.74", "1.76", "1.78", "1.80"]);
        assert_eq!(labels(Ticks::of_steps(100_000, 5)), ["0", "20k", "40k", "60k", "80k", "100k"]);
        assert_eq!(labels(Ticks::around(0.0, 2.2e6, 5)), ["0", "0.5M", "1.0M", "1.5M", "2.0M", "2.5M"]);
        assert_eq!(
            labels(Ticks::around(0.0, 3e-4, 6)),
            ["0", "5e-5", "1.0e-4", "1.5e-4", "2.0e-4", "2.5e-4", "3.0e-4"]
        );
        assert_eq!(labels(Ticks::around(0.0, 2.1e-5, 3)), ["0", "1e-5", "2e-5", "3e-5"]);
        for (low, high) in [(1e99, 2e99), (-1e-300, 1e-300), (9.9e12, 1.1e13), (1e9, 1e9 + 60.0)] {
            let mut labels = labels(Ticks::around(low, high, 6));
            let num_ticks = labels.len();
            labels.dedup();
            assert!(labels.len() == num_ticks && (2..=9).contains(&num_ticks), "{labels:?}");
        }
    }

    #[test]
    fn one_value_or_none_has_an_axis() {
        for (low, high) in [(2.0, 2.0), (0.0, 0.0), (-3.0, -3.0), (f64::INFINITY, f64::NEG_INFINITY)] {
            let ticks = Ticks::around(low, high, 6);
            assert!(ticks.low < ticks.high && ticks.values().count() >= 3, "{ticks:?}");
            assert!(low > high || (ticks.low < low && high < ticks.high), "{ticks:?}");
        }
    }
}
