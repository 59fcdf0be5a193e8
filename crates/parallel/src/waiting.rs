use std::time::{Duration, Instant};
use trireme_comm::{Buffer, CommError, Element, FusedWork, Work};

/// How long a rank waits for communication with nothing else to do.
#[derive(Debug, Default)]
pub(crate) struct Waiting(Duration);

impl Waiting {
    /// Waits for an operation.
    pub(crate) fn wait<T>(&mut self, work: Work<T>) -> Result<T, CommError> {
        self.during(|| work.wait())
    }

    /// Waits for a vector that may be reduced with others.
    pub(crate) fn wait_fused<T: Element>(&mut self, work: FusedWork<T>) -> Result<Buffer<T>, CommError> {
        self.during(|| work.wait())
    }

    fn during<T>(&mut self, wait: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let result = wait();
        self.0 += began.elapsed();
        result
    }

    /// Adds what another one has counted.
    pub(crate) fn add(&mut self, other: Waiting) {
        self.0 += other.0;
    }

    /// How long it was, all in all.
    pub(crate) fn total(&self) -> Duration {
        self.0
    }
}
