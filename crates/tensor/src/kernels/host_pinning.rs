//! Pinned memory of the host, which hardware copies without the help of the processor.

use std::fmt;
use std::ptr::NonNull;

/// Pins memory of the host until it is dropped.
pub(crate) trait HostPinning: fmt::Debug + Send + Sync {
    /// Pins accessible memory, which stays mapped until this object is dropped. Memory that the system does not pin is copied more slowly.
    fn pin(&self, start: NonNull<u8>, num_bytes: usize);

    /// Returns the error of the first [`pin`](HostPinning::pin) that failed.
    fn failure(&self) -> Option<&str>;
}
