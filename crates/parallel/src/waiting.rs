use std::time::{Duration, Instant};
use trireme_comm::{CommError, Work};

/// How long a rank waits for communication with nothing else to do.
#[derive(Debug, Default)]
pub(crate) struct Waiting(Duration);

impl Waiting {
    /// Waits for an operation.
    pub(crate) fn wait<T>(&mut self, work: Work<T>) -> Result<T, CommError> {
        let began = Instant::now();
        let result = work.wait();
        self.0 += began.elapsed();
        result
    }

    /// How long it was, all in all.
    pub(crate) fn total(&self) -> Duration {
        self.0
    }
}
