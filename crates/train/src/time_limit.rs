//! The time limit of a run, and the choice of the last step that fits into it.

use std::time::{Duration, Instant};

/// Factor by which the next checkpoint is assumed to take longer than the longest one so far, as numerator and denominator.
const SAVE_TIME_FACTOR: (u32, u32) = (3, 2);

/// Time reserved for the end of the process: the run's whole time divided by this number, but at most this duration.
const SHUTDOWN_TIME: (u32, Duration) = (20, Duration::from_secs(30));

/// Assumed time of the first checkpoint: the run's whole time divided by this number, but at most this duration.
const FIRST_SAVE_TIME: (u32, Duration) = (10, Duration::from_secs(600));

/// The end of a run, and the measured times of its steps, validations and checkpoints.
#[derive(Debug, Clone)]
pub(crate) struct TimeLimit {
    end: Instant,
    /// Time from the first step to the end.
    total_time: Duration,
    /// The time at which the step program last began.
    began: Option<Instant>,
    /// Time of checkpoints and validations since `began`.
    between_steps: Duration,
    longest_step: Duration,
    longest_validation: Duration,
    longest_save: Option<Duration>,
}

impl TimeLimit {
    /// Creates the limit of a run whose first step begins `now` or later. `saves` says whether the run writes checkpoints.
    pub(crate) fn new(now: Instant, end: Instant, saves: bool) -> Self {
        TimeLimit {
            end,
            total_time: end.saturating_duration_since(now),
            began: None,
            between_steps: Duration::ZERO,
            longest_step: Duration::ZERO,
            longest_validation: Duration::ZERO,
            longest_save: (!saves).then_some(Duration::ZERO),
        }
    }

    pub(crate) fn add_save(&mut self, took: Duration) {
        self.between_steps += took;
        self.longest_save = Some(self.longest_save.map_or(took, |longest| longest.max(took)));
    }

    /// Records the time of a validation, which may precede the first step.
    pub(crate) fn add_validation(&mut self, took: Duration) {
        self.between_steps += took;
        self.longest_validation = self.longest_validation.max(took);
    }

    /// Records that the step program begins `now`. Returns whether this must be its last execution: after another one, and the validation
    /// that may follow it, the remaining time might not suffice for a checkpoint.
    pub(crate) fn begin_step(&mut self, now: Instant) -> bool {
        if let Some(began) = self.began.replace(now) {
            let took = now.saturating_duration_since(began).saturating_sub(self.between_steps);
            self.longest_step = self.longest_step.max(took);
        }
        self.between_steps = Duration::ZERO;
        let part = |(part, most): (u32, Duration)| (self.total_time / part).min(most);
        let saving = match self.longest_save {
            Some(longest) => longest * SAVE_TIME_FACTOR.0 / SAVE_TIME_FACTOR.1,
            None => part(FIRST_SAVE_TIME),
        };
        // A validation may follow either step.
        now + 2 * (self.longest_step + self.longest_validation) + saving + part(SHUTDOWN_TIME) >= self.end
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn the_last_step_leaves_time_for_a_checkpoint() {
        let start = Instant::now();
        // Makes steps of five seconds, and returns the second at which the last one begins.
        let last_from = |mut limit: TimeLimit| {
            (0..1000).step_by(5).find(|&second| limit.begin_step(start + seconds(second)))
        };
        let new = || TimeLimit::new(start, start + seconds(1000), true);
        // 100 s for the checkpoint, 30 s for the end, and two steps.
        assert_eq!(last_from(new()), Some(860));
        let mut limit = new();
        limit.add_save(seconds(10));
        limit.add_save(seconds(40));
        limit.add_save(seconds(20));
        assert_eq!(last_from(limit), Some(900));
        // Without checkpoints.
        assert_eq!(last_from(TimeLimit::new(start, start + seconds(1000), false)), Some(960));
        // A step of 60 s. The time of the checkpoint is not counted as part of it.
        let mut limit = new();
        assert!(!limit.begin_step(start - seconds(100)));
        limit.add_save(seconds(40));
        assert_eq!(last_from(limit), Some(790));
        // A validation before the first step. Later ones are assumed to take as long, but steps are not.
        let mut limit = new();
        limit.add_validation(seconds(30));
        assert_eq!(last_from(limit), Some(800));
    }

    #[test]
    fn a_run_without_time_makes_one_step() {
        let start = Instant::now();
        assert!(TimeLimit::new(start, start, true).begin_step(start));
        assert!(TimeLimit::new(start, start - seconds(1), false).begin_step(start));
    }
}
