use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::{Errno, read, write};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

/// A thread, and the state by which its owner controls it. The thread ends when this value is dropped.
#[derive(Debug)]
pub(super) struct ControlledThread<O> {
    control: Arc<ThreadControl<O>>,
    thread: Option<JoinHandle<()>>,
}

/// The thread's side of a [`ControlledThread`] value.
#[derive(Debug)]
pub(super) struct ThreadControl<O> {
    /// Event descriptor by which the owner wakes the thread.
    waker: OwnedFd,
    /// The state that the owner and the thread share. `None` when the thread is to end.
    state: Mutex<Option<O>>,
}

impl<O: Default + Send + 'static> ControlledThread<O> {
    /// Starts a thread on `run`, which must return once the state is `None`.
    pub(super) fn start(run: impl FnOnce(&ThreadControl<O>) + Send + 'static) -> Self {
        let waker = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("a descriptor");
        let control = Arc::new(ThreadControl { waker, state: Mutex::new(Some(O::default())) });
        let own = Arc::clone(&control);
        ControlledThread { control, thread: Some(std::thread::spawn(move || run(&own))) }
    }
}

impl<O> ControlledThread<O> {
    pub(super) fn update(&self, change: impl FnOnce(&mut O)) {
        self.with_state(change);
        self.control.wake();
    }

    /// Calls `read` with the state, in which the thread may also record results.
    pub(super) fn with_state<R>(&self, read: impl FnOnce(&mut O) -> R) -> R {
        read(self.control.state().as_mut().expect("orders last as long as their owner"))
    }
}

impl<O> ThreadControl<O> {
    /// Locks the state, which is `None` if the thread is to end. Everything that the thread does under the lock is done before the owner's
    /// next change.
    pub(super) fn state(&self) -> MutexGuard<'_, Option<O>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the current wait, or else the next one.
    fn wake(&self) {
        // Fails only after 2^64 calls without a wait.
        let _ = write(&self.waker, &1_u64.to_ne_bytes());
    }

    /// Waits until a descriptor in `ready` is ready, the time `until` has come, or the state changes. May return earlier.
    pub(super) fn wait<'a>(&'a self, mut ready: Vec<PollFd<'a>>, until: Option<Instant>) {
        ready.push(PollFd::new(&self.waker, PollFlags::IN));
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let timeout = left.map(|left| Timespec::try_from(left).expect("delays are short"));
        match poll(&mut ready, timeout.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => panic!("a relay cannot wait: {error}"),
        }
        let _ = read(&self.waker, &mut [0; 8]);
    }
}

impl<O> Drop for ControlledThread<O> {
    fn drop(&mut self) {
        *self.control.state() = None;
        self.control.wake();
        if let Some(Err(panic)) = self.thread.take().map(JoinHandle::join)
            && !std::thread::panicking()
        {
            std::panic::resume_unwind(panic);
        }
    }
}
