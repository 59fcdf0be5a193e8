//! Times repeated runs of a function.

use std::time::{Duration, Instant};

/// Minimum number of runs for a median. Until this number is reached, [`time_runs`] continues for up to [`EXTENDED_DURATION`], even if its
/// `duration` is shorter.
pub(crate) const NUM_RUNS_MIN: usize = 3;
const EXTENDED_DURATION: Duration = Duration::from_secs(1);

/// Maximum number of runs; more do not change the median.
const NUM_RUNS_MAX: usize = 1000;

/// Minimum time of a run.
const SECONDS_MIN: f64 = 1e-9;

/// Run times, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timing {
    /// Time of the fastest run.
    pub best: f64,
    /// Median time.
    pub median: f64,
}

impl Timing {
    fn of(mut seconds: Vec<f64>) -> Self {
        seconds.sort_by(f64::total_cmp);
        Timing { best: seconds[0], median: seconds[seconds.len() / 2] }
    }
}

/// Repeats `run`, which returns the seconds that it took, for about `duration`, after one run that is not counted.
pub(crate) fn time_runs<E>(duration: Duration, mut run: impl FnMut() -> Result<f64, E>) -> Result<Timing, E> {
    run()?;
    let began = Instant::now();
    let mut seconds = Vec::with_capacity(NUM_RUNS_MAX);
    loop {
        // The time between two readings of a coarse clock may be 0. The minimum keeps throughputs finite.
        seconds.push(run()?.max(SECONDS_MIN));
        let duration = if seconds.len() < NUM_RUNS_MIN { duration.max(EXTENDED_DURATION) } else { duration };
        if began.elapsed() >= duration || seconds.len() == NUM_RUNS_MAX {
            break;
        }
    }
    Ok(Timing::of(seconds))
}
