//! Work that may never end, such as reading from a file system that hangs.

use std::io;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

/// Returns what `work` returns. If that takes longer than `limit`, the thread that does it is abandoned.
///
/// # Errors
/// `TimedOut` if `work` takes longer or panics; the system's error if it refuses a thread.
pub(crate) fn within<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    let (sender, receiver) = channel();
    let send = move || drop(sender.send(work()));
    thread::Builder::new().name("bounded".to_owned()).spawn(send)?;
    let unfinished = |_| io::Error::new(io::ErrorKind::TimedOut, "the file system does not respond");
    receiver.recv_timeout(limit).map_err(unfinished)
}
