use super::Conditions;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// One direction of a relay: a first-in, first-out queue of items in flight.
#[derive(Debug)]
pub(super) struct DelayQueue<T> {
    conditions: Conditions,
    /// Time at which the last item has left the sender. `None` before the first item.
    idle_from: Option<Instant>,
    in_flight: VecDeque<InFlight<T>>,
    num_bytes: usize,
}

#[derive(Debug)]
struct InFlight<T> {
    arrival: Instant,
    num_bytes: usize,
    content: T,
}

impl<T> DelayQueue<T> {
    pub(super) fn new(conditions: Conditions) -> Self {
        DelayQueue { conditions, idle_from: None, in_flight: VecDeque::new(), num_bytes: 0 }
    }

    /// Sends an item of `num_bytes` bytes. Its transmission begins when all earlier items have left, and takes time according to the rate.
    /// The item arrives when its transmission has ended and the delay has passed.
    pub(super) fn send(&mut self, now: Instant, num_bytes: usize, content: T) {
        let start = self.idle_from.map_or(now, |idle_from| idle_from.max(now));
        let duration = self.conditions.bits_per_second.map_or(Duration::ZERO, |bits_per_second| {
            Duration::from_secs_f64(8.0 * num_bytes as f64 / bits_per_second as f64)
        });
        let end = start + duration;
        self.idle_from = Some(end);
        self.num_bytes += num_bytes;
        self.in_flight.push_back(InFlight { arrival: end + self.conditions.delay, num_bytes, content });
    }

    pub(super) fn receive(&mut self, now: Instant) -> Option<T> {
        if self.next_arrival()? > now {
            return None;
        }
        let first = self.in_flight.pop_front()?;
        self.num_bytes -= first.num_bytes;
        Some(first.content)
    }

    /// Returns when the next item arrives. `None` if no item is in flight.
    pub(super) fn next_arrival(&self) -> Option<Instant> {
        self.in_flight.front().map(|first| first.arrival)
    }

    pub(super) fn num_bytes(&self) -> usize {
        self.num_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn without_conditions_all_arrives_at_once_and_in_order() {
        let now = Instant::now();
        let mut line = DelayQueue::new(Conditions::default());
        line.send(now, 1000, 'a');
        line.send(now, 0, 'b');
        assert_eq!(line.num_bytes(), 1000);
        assert_eq!([line.receive(now), line.receive(now), line.receive(now)], [Some('a'), Some('b'), None]);
        assert_eq!((line.num_bytes(), line.next_arrival()), (0, None));
    }

    #[test]
    fn a_delay_keeps_the_distance_between_items() {
        let start = Instant::now();
        let mut line = DelayQueue::new(Conditions { delay: 3 * SECOND, bits_per_second: None });
        line.send(start, 10, 'a');
        line.send(start + SECOND, 10, 'b');
        let before = start + 3 * SECOND - Duration::from_nanos(1);
        assert_eq!(line.receive(before), None);
        assert_eq!(line.next_arrival(), Some(start + 3 * SECOND));
        assert_eq!(line.receive(start + 3 * SECOND), Some('a'));
        assert_eq!(line.receive(start + 3 * SECOND), None);
        assert_eq!(line.next_arrival(), Some(start + 4 * SECOND));
    }

    #[test]
    fn a_rate_serializes_items_and_does_not_accumulate_idle_time() {
        let start = Instant::now();
        let mut line = DelayQueue::new(Conditions { delay: SECOND, bits_per_second: Some(80) });
        let arrivals = [(start, 10), (start, 20), (start + 9 * SECOND, 10)].map(|(now, num_bytes)| {
            line.send(now, num_bytes, ());
            line.in_flight.back().unwrap().arrival
        });
        assert_eq!(arrivals, [start + 2 * SECOND, start + 4 * SECOND, start + 11 * SECOND]);
    }
}
