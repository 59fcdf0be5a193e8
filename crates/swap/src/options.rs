use crate::{ALIGNMENT, Access, SwapError};
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use trireme_base::Bytes;

trireme_base::named! {
    /// The IO method of a swap file, from the fastest to the slowest.
    pub enum IoMethod {
        /// Direct IO through io_uring, by a single thread.
        Ring = "direct IO through io_uring",
        /// Direct IO by several threads. Each thread blocks on one part at a time.
        DirectThreads = "direct IO by threads",
        /// IO through the page cache by several threads. The cache uses memory, which offloading is meant to save.
        BufferedThreads = "IO through the page cache by threads",
    }
}

/// Options of a swap file. The defaults suit a disk with a bandwidth of some GB/s.
#[derive(Debug, Clone)]
pub struct SwapOptions {
    /// The fastest method to try. Slower methods are the fallback if the system does not allow it.
    pub method: IoMethod,
    /// Maximum length of a single read or write in bytes: a multiple of [`ALIGNMENT`] up to 1 GiB.
    pub part_bytes: usize,
    /// Maximum number of parts in flight with io_uring, from 1 to 4096.
    pub queue_depth: usize,
    /// Number of threads of the other methods, from 1 to 256. Each has one part in flight.
    pub num_threads: usize,
    /// Maximum duration of a transfer, counted from the submission of its first part. Must not be zero.
    pub timeout: Duration,
    /// A hook that sees and may change the result of each part. Tests use it to simulate a failing disk.
    pub interceptor: Option<Arc<dyn Interceptor>>,
}

impl Default for SwapOptions {
    fn default() -> Self {
        SwapOptions {
            method: IoMethod::Ring,
            part_bytes: 1 << 20,
            queue_depth: 32,
            num_threads: 4,
            timeout: Duration::from_secs(60),
            interceptor: None,
        }
    }
}

/// A hook between the system and a [`SwapFile`](crate::SwapFile). It is called for every [`IoMethod`].
pub trait Interceptor: Send + Sync + fmt::Debug {
    /// Returns the result that the swap file uses in place of `result`: the number of bytes moved, or an error.
    ///
    /// Called after the system has read or written the part, by the thread that issued it, with no lock held. While this method blocks, the
    /// thread hangs as if it were blocked in the system.
    ///
    /// # Errors
    /// Any error. The swap file handles it like an error of the system.
    fn result(&self, access: &Access, result: io::Result<usize>) -> io::Result<usize>;
}

impl SwapOptions {
    const PART_BYTES_MAX: usize = 1 << 30;
    const QUEUE_DEPTH_MAX: usize = 4096;
    const NUM_THREADS_MAX: usize = 256;

    pub(crate) fn validate(&self) -> Result<(), SwapError> {
        let refuse = |what: String| Err(SwapError::Options { what });
        let SwapOptions { part_bytes, queue_depth, num_threads, timeout, .. } = *self;
        if !part_bytes.is_multiple_of(ALIGNMENT) || !(ALIGNMENT..=Self::PART_BYTES_MAX).contains(&part_bytes)
        {
            let max = Bytes(Self::PART_BYTES_MAX as u64);
            return refuse(format!(
                "the part size of a swap file cannot be {part_bytes} bytes; use a multiple of {ALIGNMENT}, up to {max}"
            ));
        }
        if !(1..=Self::QUEUE_DEPTH_MAX).contains(&queue_depth) {
            let max = Self::QUEUE_DEPTH_MAX;
            return refuse(format!("the queue depth of a swap file cannot be {queue_depth}; use 1 to {max}"));
        }
        if !(1..=Self::NUM_THREADS_MAX).contains(&num_threads) {
            let max = Self::NUM_THREADS_MAX;
            return refuse(format!("a swap file cannot have {num_threads} threads; use 1 to {max}"));
        }
        if timeout.is_zero() {
            return refuse("a transfer needs time; use a timeout of seconds, such as 60".to_owned());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_options_are_refused() {
        let default = SwapOptions::default;
        default().validate().expect("the default is valid");
        let refused = [
            SwapOptions { part_bytes: 0, ..default() },
            SwapOptions { part_bytes: ALIGNMENT + 512, ..default() },
            SwapOptions { part_bytes: 2 << 30, ..default() },
            SwapOptions { queue_depth: 0, ..default() },
            SwapOptions { queue_depth: 5000, ..default() },
            SwapOptions { num_threads: 0, ..default() },
            SwapOptions { num_threads: 257, ..default() },
            SwapOptions { timeout: Duration::ZERO, ..default() },
        ];
        for options in refused {
            assert!(matches!(options.validate(), Err(SwapError::Options { .. })), "{options:?}");
        }
    }
}
