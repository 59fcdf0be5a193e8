//! When the actions of a step ran.

use std::time::{Duration, Instant};

/// When an action ran. All clocks of a host read the same (`CLOCK_MONOTONIC`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ActionTime {
    /// The rank came to it: the action before had ended.
    pub issued: Instant,
    /// Its own work began. Until then it waited for what it works with, and took over a message that had come. What it
    /// waited for later is put before its work as well, so that the work is as long as it was.
    pub start: Instant,
    /// The rank went on. What the action has started may overlap with the next ones.
    pub end: Instant,
    /// Operations of the matrix products that it issued.
    pub product_operations: u64,
}

/// The actions of the current or last step, in the program's order. An action takes two readings of the clock, and no memory.
pub(super) struct Timeline {
    now: Instant,
    start: Instant,
    /// Operations of matrix products since the step began.
    product_operations: u64,
    pub(super) actions: Vec<ActionTime>,
}

impl Timeline {
    pub(super) fn new(num_actions: usize) -> Self {
        let now = Instant::now();
        Timeline { now, start: now, product_operations: 0, actions: Vec::with_capacity(num_actions) }
    }

    pub(super) fn begin(&mut self) {
        self.actions.clear();
        self.product_operations = 0;
        self.now = Instant::now();
    }

    /// What the action works with is at hand.
    pub(super) fn start(&mut self) {
        self.start = Instant::now();
    }

    /// Since its start the action has waited for so long.
    pub(super) fn has_waited(&mut self, waited: Duration) {
        self.start += waited;
    }

    /// The action ends, and the next one begins. The step has issued so many operations of matrix products.
    pub(super) fn end(&mut self, product_operations: u64) {
        let issued = std::mem::replace(&mut self.now, Instant::now());
        let before = std::mem::replace(&mut self.product_operations, product_operations);
        let product_operations = product_operations - before;
        self.actions.push(ActionTime { issued, start: self.start, end: self.now, product_operations });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn actions_follow_each_other_and_what_they_wait_is_not_their_work() {
        let mut timeline = Timeline::new(2);
        for _ in 0..2 {
            timeline.begin();
            timeline.start();
            timeline.end(6);
            timeline.start();
            let started = timeline.start;
            timeline.has_waited(Duration::from_nanos(5));
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
