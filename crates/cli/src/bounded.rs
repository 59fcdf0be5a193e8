//! Work that may never end, such as reading from a file system that hangs.

use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

/// What `work` returns, unless that takes longer than `limit`: then its thread is left to itself.
pub(crate) fn within<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (sender, receiver) = channel();
    let send = move || drop(sender.send(work()));
    // Work that cannot be started does not end either.
    thread::Builder::new().name("bounded".to_owned()).spawn(send).ok()?;
    receiver.recv_timeout(limit).ok()
}
