use crate::{ALIGNMENT, Access, SwapError};
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use trireme_base::Bytes;

trireme_base::named! {
    /// How bytes get to the disk and back, the fastest first.
    pub enum Method {
        /// Direct IO, through io_uring, by one thread.
        Ring = "direct IO through io_uring",
        /// Direct IO, by threads that each wait for a part.
        DirectThreads = "direct IO by threads",
        /// By threads, through the page cache: it takes memory, which is what offloading is to save.
        BufferedThreads = "IO through the page cache by threads",
    }
}

/// How a swap file works. The default suits a disk of some GB/s.
#[derive(Debug, Clone)]
pub struct SwapOptions {
    /// The fastest method to try; those after it follow where the system does not allow it.
    pub method: Method,
    /// The length in bytes of what the system is asked for at a time; a multiple of [`ALIGNMENT`].
    pub part_bytes: usize,
    /// How many parts io_uring has at a time.
    pub queue_depth: usize,
    /// How many threads the other methods have, and so parts at a time.
    pub num_threads: usize,
    /// How long a transfer may take, from when its first part goes to the system.
    pub timeout: Duration,
    /// Sees, and may change, what the system says of each part. Tests play a failing disk with it.
    pub interceptor: Option<Arc<dyn Interceptor>>,
}

impl Default for SwapOptions {
    fn default() -> Self {
        SwapOptions {
            method: Method::Ring,
            part_bytes: 1 << 20,
            queue_depth: 32,
            num_threads: 4,
            timeout: Duration::from_secs(60),
            interceptor: None,
        }
    }
}

/// Stands between the system and a [`SwapFile`](crate::SwapFile), whatever the method.
pub trait Interceptor: Send + Sync + fmt::Debug {
    /// What the file is to take as the result of a part: the number of bytes moved, or why not.
    ///
    /// Called after the system has read or written the part, by the thread that asked for it, and without a
    /// lock held: as long as it does not return, that thread hangs as if in the system.
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
    fn options_that_cannot_be_are_refused() {
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
