//! The times at which the actions of a step ran.

use std::time::{Duration, Instant};

/// The times of an action. All processes of a host read the same clock (`CLOCK_MONOTONIC`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ActionTime {
    /// The time at which the rank reached this action: the end of the previous one.
    pub issued: Instant,
    /// The start of the action's work, after the rank has waited for the action's inputs and copied received messages. Waits during the
    /// work shift it later by their duration, so `end - start` is the time spent working.
    pub start: Instant,
    /// The end of the action. Operations that it has started may overlap with later actions.
    pub end: Instant,
    /// Number of operations in the matrix products that it has issued.
    pub product_operations: u64,
}

/// The times of the actions of the current or last step, in program order. An action costs two readings of the clock, and no memory.
pub(super) struct Timeline {
    issued: Instant,
    start: Instant,
    /// Operations in matrix products since the start of the step.
    product_operations: u64,
    pub(super) actions: Vec<ActionTime>,
}

impl Timeline {
    pub(super) fn new(num_actions: usize) -> Self {
        let now = Instant::now();
        Timeline { issued: now, start: now, product_operations: 0, actions: Vec::with_capacity(num_actions) }
    }

    pub(super) fn begin(&mut self) {
        self.actions.clear();
        self.product_operations = 0;
        self.issued = Instant::now();
    }

    /// Starts the work of the current action, whose inputs are complete.
    pub(super) fn start(&mut self) {
        self.start = Instant::now();
    }

    /// Excludes a wait of the current action from its work.
    pub(super) fn exclude_wait(&mut self, waited: Duration) {
        self.start += waited;
    }

    /// Ends the current action, and begins the next one. `product_operations` is the number of operations in matrix products since the
    /// start of the step.
    pub(super) fn end(&mut self, product_operations: u64) {
        let issued = std::mem::replace(&mut self.issued, Instant::now());
        let before = std::mem::replace(&mut self.product_operations, product_operations);
        let product_operations = product_operations - before;
        self.actions.push(ActionTime { issued, start: self.start, end: self.issued, product_operations });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn actions_are_contiguous_and_waits_are_not_work() {
        let mut timeline = Timeline::new(2);
        for _ in 0..2 {
            timeline.begin();
            timeline.start();
            timeline.end(6);
            timeline.start();
            let started = timeline.start;
            timeline.exclude_wait(Duration::from_nanos(5));
            timeline.end(10);
            let [first, second] = timeline.actions[..] else { panic!("a step has two actions") };
            assert!(first.issued <= first.start && first.start <= first.end);
            assert_eq!(second.issued, first.end);
            assert_eq!([first, second].map(|action| action.product_operations), [6, 4]);
            assert_eq!(second.start, started + Duration::from_nanos(5));
            assert_eq!(timeline.actions.capacity(), 2);
        }
    }
}
