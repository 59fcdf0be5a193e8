//! Runs blocking work with a time limit, such as reading from a file system that hangs.

use std::io;
use std::sync::mpsc::channel;
use std::time::Duration;
use trireme_base::spawn_thread;

/// Returns the result of `work`. If it takes longer than `limit`, its thread is abandoned.
///
/// # Errors
/// `TimedOut` if `work` takes longer or panics; the system's error if it refuses a thread.
pub(crate) fn run_with_timeout<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> io::Result<T> {
    let (sender, receiver) = channel();
    let send = move || drop(sender.send(work()));
    spawn_thread("bounded", send)?;
    let unfinished = |_| io::Error::new(io::ErrorKind::TimedOut, "the file system does not respond");
    receiver.recv_timeout(limit).map_err(unfinished)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_that_does_not_end_is_abandoned() {
        assert_eq!(run_with_timeout(Duration::from_secs(60), || 7).unwrap(), 7);
        let (release, blocked) = channel::<()>();
        let error = run_with_timeout(Duration::from_millis(1), move || blocked.recv()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(error.to_string().contains("does not respond"));
        drop(release);
    }
}
