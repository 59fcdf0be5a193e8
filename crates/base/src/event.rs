//! Completion events of devices and groups, and host memory that is in use until such an event.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// A point in the work of a device or of a group. The event is done when everything that was issued before it has run. If something that
/// was issued before it fails, the event fails, too.
///
/// Clones are the same event. Events of a device that runs its work synchronously are always done, and cost nothing.
#[derive(Clone, Default)]
pub struct Event(Option<Arc<EventCompleter>>);

impl Event {
    /// An event that is done.
    pub const DONE: Event = Event(None);

    /// Returns whether the event is done or has failed.
    pub fn is_done(&self) -> bool {
        self.0.as_ref().is_none_or(|completer| completer.lock().outcome.is_some())
    }

    /// Returns whether both are clones of the same event. All events that were created as [`DONE`](Event::DONE) are the same.
    pub fn is_same(&self, other: &Event) -> bool {
        self.0.as_ref().map(Arc::as_ptr) == other.0.as_ref().map(Arc::as_ptr)
    }

    /// Returns whether another clone of the event or a handle of its [`EventCompleter`] exists. Always false for [`DONE`](Event::DONE).
    pub fn is_shared(&self) -> bool {
        self.0.as_ref().is_some_and(|completer| Arc::strong_count(completer) > 1)
    }

    /// Returns the cause if something that was issued before the event has failed.
    pub fn failure(&self) -> Option<String> {
        self.0.as_ref().and_then(|completer| completer.lock().outcome.clone()?.err())
    }

    /// Blocks until the event is done. Signals [demand](Event::demand) first.
    ///
    /// # Panics
    /// If something that was issued before the event has failed. The message is the cause.
    pub fn wait(&self) {
        self.outcome().unwrap_or_else(|cause| panic!("{cause}"));
    }

    /// Blocks until the event is done or has failed, like [`wait`](Event::wait).
    ///
    /// # Errors
    /// Returns the cause if something that was issued before the event has failed.
    pub fn outcome(&self) -> Result<(), String> {
        let Some(completer) = &self.0 else { return Ok(()) };
        self.demand();
        let mut state = completer.lock();
        loop {
            match &state.outcome {
                Some(outcome) => return outcome.clone(),
                None => state = completer.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Tells the device that the caller is waiting for the event, unless the event is done or has failed.
    pub fn demand(&self) {
        if let Some(completer) = &self.0 {
            completer.demand();
        }
    }

    /// Calls `wake` once, when the event is done or fails. Calls it at once if that is already the case.
    pub fn on_done(&self, wake: impl FnOnce() + Send + 'static) {
        let Some(completer) = &self.0 else { return wake() };
        let mut state = completer.lock();
        if state.outcome.is_none() {
            state.callbacks.push(Box::new(wake));
            return;
        }
        drop(state);
        wake();
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_done() { "Event(done)" } else { "Event(pending)" })
    }
}

/// The completing side of an [`Event`].
pub struct EventCompleter {
    state: Mutex<EventState>,
    changed: Condvar,
    on_demand: Box<dyn Fn() + Send + Sync>,
}

type Callback = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct EventState {
    /// `None` while the event is pending. An error is the cause of the failure.
    outcome: Option<Result<(), String>>,
    callbacks: Vec<Callback>,
}

impl EventCompleter {
    /// Creates the completer of a pending event. `on_demand` is called for each [`demand`](Event::demand) and [`wait`](Event::wait) while
    /// the event is pending.
    pub fn new(on_demand: impl Fn() + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(EventCompleter {
            state: Mutex::default(),
            changed: Condvar::new(),
            on_demand: Box::new(on_demand),
        })
    }

    /// Returns the event that this completer completes.
    pub fn event(self: &Arc<Self>) -> Event {
        Event(Some(Arc::clone(self)))
    }

    /// Completes the event, or fails it with a cause. Wakes all waiting threads and runs all callbacks. Only the first outcome counts.
    pub fn complete(&self, outcome: Result<(), String>) {
        let mut state = self.lock();
        state.outcome.get_or_insert(outcome);
        let wakes = std::mem::take(&mut state.callbacks);
        drop(state);
        self.changed.notify_all();
        wakes.into_iter().for_each(|wake| wake());
    }

    fn demand(&self) {
        if self.lock().outcome.is_none() {
            (self.on_demand)();
        }
    }

    fn lock(&self) -> MutexGuard<'_, EventState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for EventCompleter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EventCompleter({:?})", self.lock().outcome)
    }
}

/// Host memory that a device or a group may still be using. The caller gets access by waiting for the device or group to finish.
#[derive(Debug)]
pub struct Pending<B>(State<B>);

#[derive(Debug)]
enum State<B> {
    Available(B),
    /// The device or group stores the memory in this slot before the event is done.
    InUse(Arc<Mutex<Option<B>>>, Event),
}

impl<B> Pending<B> {
    /// Wraps memory that no device or group uses.
    pub fn new(memory: B) -> Self {
        Pending(State::Available(memory))
    }

    /// Wraps memory that will be stored in `slot` before `event` is done. If `event` is [`Event::DONE`] and `slot` holds the memory
    /// already, the memory is available immediately.
    pub fn until(event: Event, slot: Arc<Mutex<Option<B>>>) -> Self {
        if event.0.is_none()
            && let Some(memory) = take_from(&slot)
        {
            return Pending::new(memory);
        }
        Pending(State::InUse(slot, event))
    }

    /// Returns the event after which no device or group uses the memory.
    pub fn event(&self) -> Event {
        match &self.0 {
            State::Available(_) => Event::DONE,
            State::InUse(_, event) => event.clone(),
        }
    }

    /// Blocks until no device or group uses the memory, and returns it.
    ///
    /// # Panics
    /// If the device or group failed.
    pub fn wait(self) -> B {
        self.event().wait();
        self.try_take().unwrap_or_else(|_| panic!("a device releases memory before the event"))
    }

    /// Blocks until no device or group uses the memory, and returns a reference to it.
    ///
    /// # Panics
    /// If the device or group failed.
    pub fn wait_mut(&mut self) -> &mut B {
        if let State::InUse(place, event) = &self.0 {
            event.wait();
            self.0 = State::Available(take_from(place).expect("a device releases memory before the event"));
        }
        self.get_mut().expect("it was waited for")
    }

    /// Returns the memory if no device or group uses it any more. Does not block.
    ///
    /// # Errors
    /// Returns `self` if the memory is still in use.
    pub fn try_take(self) -> Result<B, Self> {
        match self.0 {
            State::Available(memory) => Ok(memory),
            State::InUse(place, event) => match take_from(&place) {
                Some(memory) => Ok(memory),
                None => Err(Pending(State::InUse(place, event))),
            },
        }
    }

    /// Returns a reference to the memory if it was never in use or has been waited for. Does not check the event.
    pub fn get(&self) -> Option<&B> {
        match &self.0 {
            State::Available(memory) => Some(memory),
            State::InUse(..) => None,
        }
    }

    /// Returns a mutable reference to the memory, under the same condition as [`get`](Pending::get).
    pub fn get_mut(&mut self) -> Option<&mut B> {
        match &mut self.0 {
            State::Available(memory) => Some(memory),
            State::InUse(..) => None,
        }
    }
}

fn take_from<B>(slot: &Mutex<Option<B>>) -> Option<B> {
    slot.lock().unwrap_or_else(PoisonError::into_inner).take()
}

/// Host memory that devices copy to and from.
pub trait HostMemory: Send + 'static {
    /// Returns all bytes.
    fn bytes(&self) -> &[u8];

    /// Returns all bytes, mutably.
    fn bytes_mut(&mut self) -> &mut [u8];
}

impl HostMemory for Vec<u8> {
    fn bytes(&self) -> &[u8] {
        self
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn memory_of_a_done_event_is_available_immediately() {
        let place = |memory| Arc::new(Mutex::new(memory));
        assert_eq!(Pending::until(Event::DONE, place(Some(5))).get(), Some(&5));
        assert_eq!(Pending::<u8>::until(Event::DONE, place(None)).get(), None);
    }

    #[test]
    fn waiting_signals_demand_and_completion_wakes_waiters() {
        let num_demands = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&num_demands);
        let completer = EventCompleter::new(move || {
            counted.fetch_add(1, Ordering::Relaxed);
        });
        let event = completer.event();
        let woken = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&woken);
        event.on_done(move || {
            counted.fetch_add(1, Ordering::Relaxed);
        });
        event.demand();
        assert!(!event.is_done() && woken.load(Ordering::Relaxed) == 0);
        std::thread::scope(|scope| {
            scope.spawn(|| event.wait());
            completer.complete(Ok(()));
        });
        assert!(event.is_done() && woken.load(Ordering::Relaxed) == 1);
        assert!(num_demands.load(Ordering::Relaxed) >= 1);
    }

    #[test]
    fn a_failure_reaches_waiters() {
        let completer = EventCompleter::new(|| ());
        completer.complete(Err("a kernel panicked".to_owned()));
        assert_eq!(completer.event().failure().as_deref(), Some("a kernel panicked"));
        let failed = std::thread::spawn(move || completer.event().wait()).join().unwrap_err();
        assert_eq!(failed.downcast_ref::<String>().unwrap(), "a kernel panicked");
    }

    #[test]
    fn memory_is_available_after_its_event() {
        let (completer, place) = (EventCompleter::new(|| ()), Arc::new(Mutex::new(None)));
        let pending = Pending::until(completer.event(), Arc::clone(&place));
        assert!(pending.get().is_none());
        let mut pending = pending.try_take().unwrap_err();
        *place.lock().unwrap() = Some(vec![7]);
        completer.complete(Ok(()));
        pending.wait_mut().push(8);
        assert_eq!(pending.wait(), [7, 8]);
        assert_eq!(Pending::new(3).wait(), 3);
    }
}
