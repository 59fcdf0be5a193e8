//! Times repeated runs of a function.

use std::time::{Duration, Instant};

/// Minimum number of runs for a median, if they take no longer than [`RUNS_MIN_DURATION`].
pub(crate) const NUM_RUNS_MIN: usize = 3;
const RUNS_MIN_DURATION: Duration = Duration::from_secs(1);

/// Maximum number of runs; more do not change the median.
const NUM_RUNS_MAX: usize = 1000;

/// Seconds that one run took.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timing {
    /// The fastest.
    pub best: f64,
    /// Half of the runs were faster.
    pub median: f64,
}

impl Timing {
    fn of(mut seconds: Vec<f64>) -> Self {
        seconds.sort_by(f64::total_cmp);
        Timing { best: seconds[0], median: seconds[seconds.len() / 2] }
    }
}

/// Times `run` for about `duration`, after one untimed run. A run is timed from the instant that `run` last set.
pub(crate) fn time_runs<E>(
    duration: Duration,
    mut run: impl FnMut(&mut Instant) -> Result<(), E>,
) -> Result<Timing, E> {
    seconds_of(&mut run)?;
    let began = Instant::now();
    let mut seconds = Vec::with_capacity(NUM_RUNS_MAX);
    loop {
        seconds.push(seconds_of(&mut run)?);
        let duration = if seconds.len() < NUM_RUNS_MIN { duration.max(RUNS_MIN_DURATION) } else { duration };
        if began.elapsed() >= duration || seconds.len() == NUM_RUNS_MAX {
            break;
        }
    }
    Ok(Timing::of(seconds))
}

/// Seconds of one run, from the instant that it leaves.
fn seconds_of<E>(run: &mut impl FnMut(&mut Instant) -> Result<(), E>) -> Result<f64, E> {
    let mut start = Instant::now();
    run(&mut start)?;
    // A clock may stand still for less than its resolution; speeds stay finite.
    Ok(start.elapsed().max(Duration::from_nanos(1)).as_secs_f64())
}
