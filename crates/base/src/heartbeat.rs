use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The time at which a rank last made progress. Other ranks use it to distinguish slow work from a hang.
///
/// Long-running work calls [`beat`](Heartbeat::beat) at least every few seconds. Clones share one state.
#[derive(Debug, Clone)]
pub struct Heartbeat {
    start: Instant,
    /// Time of the last progress, in milliseconds after `start`.
    last: Arc<AtomicU64>,
}

impl Heartbeat {
    /// Creates a heartbeat whose last progress is now.
    pub fn new() -> Self {
        Heartbeat { start: Instant::now(), last: Arc::default() }
    }

    /// Records that the rank makes progress now.
    pub fn beat(&self) {
        self.beat_at(Instant::now());
    }

    /// Records that the rank, or a rank that it waits for, made progress at `at`. A time before the recorded one has no effect.
    pub fn beat_at(&self, at: Instant) {
        let milliseconds = at.saturating_duration_since(self.start).as_millis() as u64;
        // Relaxed: this store publishes no other memory.
        self.last.fetch_max(milliseconds, Ordering::Relaxed);
    }

    /// Returns the time since the last recorded progress.
    pub fn age(&self) -> Duration {
        let last = Duration::from_millis(self.last.load(Ordering::Relaxed));
        self.start.elapsed().saturating_sub(last)
    }
}

impl Default for Heartbeat {
    fn default() -> Self {
        Heartbeat::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_progress_counts() {
        let heartbeat = Heartbeat { start: Instant::now() - Duration::from_secs(100), last: Arc::default() };
        let age_secs = |heartbeat: &Heartbeat| heartbeat.age().as_secs();
        assert_eq!(age_secs(&heartbeat), 100);
        let now = Instant::now();
        heartbeat.clone().beat_at(now - Duration::from_secs(30));
        heartbeat.beat_at(now - Duration::from_secs(60));
        assert_eq!(age_secs(&heartbeat), 30);
        heartbeat.beat();
        assert_eq!(age_secs(&heartbeat), 0);
    }
}
