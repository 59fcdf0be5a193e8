use super::waker::Waker;
use rustix::event::PollFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

/// A thread, and the orders by which its owner steers it; it ends with this value.
#[derive(Debug)]
pub(super) struct Steered<O> {
    steering: Arc<Steering<O>>,
    thread: Option<JoinHandle<()>>,
}

/// A thread's side of its [`Steered`].
#[derive(Debug)]
pub(super) struct Steering<O> {
    waker: Waker,
    /// None when the thread is to end.
    orders: Mutex<Option<O>>,
}

impl<O: Default + Send + 'static> Steered<O> {
    /// Starts a thread on `run`, which returns once there are no orders any more.
    pub(super) fn start(run: impl FnOnce(&Steering<O>) + Send + 'static) -> Self {
        let steering = Arc::new(Steering { waker: Waker::new(), orders: Mutex::new(Some(O::default())) });
        let own = Arc::clone(&steering);
        Steered { steering, thread: Some(std::thread::spawn(move || run(&own))) }
    }
}

impl<O> Steered<O> {
    /// Changes the orders, and wakes the thread.
    pub(super) fn tell(&self, change: impl FnOnce(&mut O)) {
        self.look(change);
        self.steering.waker.wake();
    }

    /// Looks at the orders, and what the thread has noted there.
    pub(super) fn look<R>(&self, read: impl FnOnce(&mut O) -> R) -> R {
        read(self.steering.orders().as_mut().expect("orders last as long as their owner"))
    }
}

impl<O> Steering<O> {
    /// The orders; none if the thread is to end. What is done while they are held is done before their owner's next change.
    pub(super) fn orders(&self) -> MutexGuard<'_, Option<O>> {
        self.orders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until something is ready, the time has come, or the orders change; sometimes for less.
    pub(super) fn wait<'a>(&'a self, ready: Vec<PollFd<'a>>, until: Option<Instant>) {
        self.waker.wait(ready, until);
    }
}

impl<O> Drop for Steered<O> {
    fn drop(&mut self) {
        *self.steering.orders() = None;
        self.steering.waker.wake();
        if let Some(Err(panic)) = self.thread.take().map(JoinHandle::join)
            && !std::thread::panicking()
        {
            std::panic::resume_unwind(panic);
        }
    }
}
