//! Reports to the user which ranks or host names this rank is waiting for while a world joins.

use crate::LineListener;
use std::cell::Cell;
use std::time::{Duration, Instant};

/// Time of waiting after which the first line is reported.
const FIRST: Duration = Duration::from_secs(10);

/// Maximum time between lines. The time doubles with each line.
const PAUSE_MAX: Duration = Duration::from_secs(60);

pub(super) struct JoinProgress<'a> {
    listener: Option<&'a LineListener>,
    next: Cell<Instant>,
    pause: Cell<Duration>,
}

impl<'a> JoinProgress<'a> {
    pub(super) fn new(listener: Option<&'a LineListener>, now: Instant) -> Self {
        JoinProgress { listener, next: Cell::new(now + FIRST), pause: Cell::new(FIRST) }
    }

    /// Reports a line if enough time has passed at time `now`.
    pub(super) fn report(&self, now: Instant, line: impl FnOnce() -> String) {
        let Some(listener) = self.listener.filter(|_| now >= self.next.get()) else { return };
        self.pause.set((2 * self.pause.get()).min(PAUSE_MAX));
        self.next.set(now + self.pause.get());
        listener.notify(&line());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    #[test]
    fn lines_become_rare() {
        let told = Arc::new(Mutex::new(Vec::new()));
        let lines = Arc::clone(&told);
        let listener = LineListener::new(move |line| lines.lock().unwrap().push(line.to_owned()));
        let start = Instant::now();
        let waiting = JoinProgress::new(Some(&listener), start);
        (0..240)
            .for_each(|second| waiting.report(start + Duration::from_secs(second), || second.to_string()));
        assert_eq!(*told.lock().unwrap(), ["10", "30", "70", "130", "190"]);
    }
}
