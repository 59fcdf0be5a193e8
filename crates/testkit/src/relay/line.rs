use super::Conditions;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// One direction of a relay: a first-in, first-out queue of items in flight.
#[derive(Debug)]
pub(super) struct Line<T> {
    conditions: Conditions,
    /// Time at which the last item has left the sender. `None` before the first item.
    idle_from: Option<Instant>,
    under_way: VecDeque<UnderWay<T>>,
    num_bytes: usize,
}

#[derive(Debug)]
struct UnderWay<T> {
    arrival: Instant,
    num_bytes: usize,
    content: T,
}

impl<T> Line<T> {
    pub(super) fn new(conditions: Conditions) -> Self {
        Line { conditions, idle_from: None, under_way: VecDeque::new(), num_bytes: 0 }
    }

    /// Sends an item. It leaves when all items before it have left, at the rate of the line, and arrives a delay later.
    pub(super) fn send(&mut self, now: Instant, num_bytes: usize, content: T) {
        let start = self.idle_from.map_or(now, |idle_from| idle_from.max(now));
        let duration = self.conditions.bits_per_second.map_or(Duration::ZERO, |bits_per_second| {
            Duration::from_secs_f64(8.0 * num_bytes as f64 / bits_per_second as f64)
        });
        let end = start + duration;
        self.idle_from = Some(end);
        self.num_bytes += num_bytes;
        self.under_way.push_back(UnderWay { arrival: end + self.conditions.delay, num_bytes, content });
    }

    pub(super) fn receive(&mut self, now: Instant) -> Option<T> {
        if self.next_arrival()? > now {
            return None;
        }
        let first = self.under_way.pop_front()?;
        self.num_bytes -= first.num_bytes;
        Some(first.content)
    }

    /// Returns when the next item arrives. `None` if no item is in flight.
    pub(super) fn next_arrival(&self) -> Option<Instant> {
        self.under_way.front().map(|first| first.arrival)
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
        let mut line = Line::new(Conditions::default());
        line.send(now, 1000, 'a');
        line.send(now, 0, 'b');
        assert_eq!(line.num_bytes(), 1000);
        assert_eq!([line.receive(now), line.receive(now), line.receive(now)], [Some('a'), Some('b'), None]);
        assert_eq!((line.num_bytes(), line.next_arrival()), (0, None));
    }

    #[test]
    fn a_delay_keeps_the_distance_between_what_is_sent() {
        let start = Instant::now();
        let mut line = Line::new(Conditions { delay: 3 * SECOND, bits_per_second: None });
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
    fn a_rate_lets_one_leave_after_the_other_and_forgets_idle_time() {
        let start = Instant::now();
        let mut line = Line::new(Conditions { delay: SECOND, bits_per_second: Some(80) });
        let arrivals = [(start, 10), (start, 20), (start + 9 * SECOND, 10)].map(|(now, num_bytes)| {
            line.send(now, num_bytes, ());
            line.under_way.back().unwrap().arrival
        });
        assert_eq!(arrivals, [start + 2 * SECOND, start + 4 * SECOND, start + 11 * SECOND]);
    }
}
