use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::{Errno, read, write};
use std::os::fd::OwnedFd;
use std::time::Instant;

/// Wakes a relay's thread when there is something to tell it.
#[derive(Debug)]
pub(super) struct Waker(OwnedFd);

impl Waker {
    pub(super) fn new() -> Self {
        Waker(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("a descriptor"))
    }

    /// Ends the wait that goes on, or else the next one.
    pub(super) fn wake(&self) {
        // It can only fail after 2^64 calls that nobody waited for.
        let _ = write(&self.0, &1_u64.to_ne_bytes());
    }

    /// Waits until something is ready, the time has come, or somebody wakes it; sometimes for less.
    pub(super) fn wait<'a>(&'a self, mut ready: Vec<PollFd<'a>>, until: Option<Instant>) {
        ready.push(PollFd::new(&self.0, PollFlags::IN));
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let timeout = left.map(|left| Timespec::try_from(left).expect("delays are short"));
        match poll(&mut ready, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => panic!("a relay cannot wait: {error}"),
        }
        let _ = read(&self.0, &mut [0; 8]);
    }
}
