//! Points in the work of devices and groups, and host memory that one of them works with until such a point.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// A point in the work of a device, or of a group. It is done when everything that was issued before it has run.
///
/// Clones are one event. An event of a device that works while it is called is always done, and costs nothing.
#[derive(Clone, Default)]
pub struct Event(Option<Arc<Latch>>);

impl Event {
    /// One that is done.
    pub const DONE: Event = Event(None);

    /// Whether it is done, or has failed.
    pub fn is_done(&self) -> bool {
        self.0.as_ref().is_none_or(|latch| latch.lock().outcome.is_some())
    }

    /// Whether both are clones of one event.
    pub fn is_same(&self, other: &Event) -> bool {
        self.0.as_ref().map(Arc::as_ptr) == other.0.as_ref().map(Arc::as_ptr)
    }

    /// Whether there are other clones of it, or something will still complete it.
    pub fn is_shared(&self) -> bool {
        self.0.as_ref().is_some_and(|latch| Arc::strong_count(latch) > 1)
    }

    /// Why it will never be done, if something that was issued before it has failed.
    pub fn failure(&self) -> Option<String> {
        self.0.as_ref().and_then(|latch| latch.lock().outcome.clone()?.err())
    }

    /// Waits until it is done.
    ///
    /// # Panics
    /// If something that was issued before it has failed.
    pub fn wait(&self) {
        let Some(latch) = &self.0 else { return };
        self.demand();
        let mut state = latch.lock();
        loop {
            match &state.outcome {
                Some(Ok(())) => return,
                Some(Err(cause)) => {
                    let cause = cause.clone();
                    drop(state);
                    panic!("{cause}");
                }
                None => state = latch.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Tells the device that somebody waits.
    pub fn demand(&self) {
        if let Some(latch) = &self.0 {
            latch.demand();
        }
    }

    /// Has `wake` called once when it is done or fails; at once if it already is.
    pub fn on_done(&self, wake: impl FnOnce() + Send + 'static) {
        let Some(latch) = &self.0 else { return wake() };
        let mut state = latch.lock();
        if state.outcome.is_none() {
            state.wakes.push(Box::new(wake));
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

/// Completes an [`Event`].
pub struct Latch {
    state: Mutex<LatchState>,
    changed: Condvar,
    on_demand: Box<dyn Fn() + Send + Sync>,
}

type Wake = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct LatchState {
    /// Of a failure its cause.
    outcome: Option<Result<(), String>>,
    wakes: Vec<Wake>,
}

impl Latch {
    /// Of an event that is not done; `on_demand` is called when somebody waits for it.
    pub fn new(on_demand: impl Fn() + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Latch { state: Mutex::default(), changed: Condvar::new(), on_demand: Box::new(on_demand) })
    }

    /// The event.
    pub fn event(self: &Arc<Self>) -> Event {
        Event(Some(Arc::clone(self)))
    }

    /// The event is done, or something that was issued before it has failed. The first outcome stays.
    pub fn complete(&self, outcome: Result<(), String>) {
        let mut state = self.lock();
        state.outcome.get_or_insert(outcome);
        let wakes = std::mem::take(&mut state.wakes);
        drop(state);
        self.changed.notify_all();
        wakes.into_iter().for_each(|wake| wake());
    }

    fn demand(&self) {
        if self.lock().outcome.is_none() {
            (self.on_demand)();
        }
    }

    fn lock(&self) -> MutexGuard<'_, LatchState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Latch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Latch({:?})", self.lock().outcome)
    }
}

/// Host memory that a device or a group may still work with. Whoever wants it waits until they have ended.
#[derive(Debug)]
pub struct Pending<B>(State<B>);

#[derive(Debug)]
enum State<B> {
    Here(B),
    /// The device puts it there before the event.
    Away(Arc<Mutex<Option<B>>>, Event),
}

impl<B> Pending<B> {
    /// Memory that nobody works with.
    pub fn new(memory: B) -> Self {
        Pending(State::Here(memory))
    }

    /// Memory that will lie in `place` when the event is done; with [`Event::DONE`], what lies there already.
    pub fn until(event: Event, place: Arc<Mutex<Option<B>>>) -> Self {
        if event.0.is_none()
            && let Some(memory) = taken(&place)
        {
            return Pending::new(memory);
        }
        Pending(State::Away(place, event))
    }

    /// When nobody works with it any more.
    pub fn event(&self) -> Event {
        match &self.0 {
            State::Here(_) => Event::DONE,
            State::Away(_, event) => event.clone(),
        }
    }

    /// Waits until nobody works with it.
    ///
    /// # Panics
    /// If the device failed.
    pub fn wait(self) -> B {
        self.event().wait();
        self.try_take().unwrap_or_else(|_| panic!("a device gives memory back before the event"))
    }

    /// As [`wait`](Pending::wait), to work with it where it lies.
    ///
    /// # Panics
    /// If the device failed.
    pub fn wait_mut(&mut self) -> &mut B {
        if let State::Away(place, event) = &self.0 {
            event.wait();
            self.0 = State::Here(taken(place).expect("a device gives memory back before the event"));
        }
        self.get_mut().expect("it was waited for")
    }

    /// The memory, if nobody works with it any more.
    ///
    /// # Errors
    /// This, if somebody does.
    pub fn try_take(self) -> Result<B, Self> {
        match self.0 {
            State::Here(memory) => Ok(memory),
            State::Away(place, event) => match taken(&place) {
                Some(memory) => Ok(memory),
                None => Err(Pending(State::Away(place, event))),
            },
        }
    }

    /// The memory, if no device was given it.
    pub fn get(&self) -> Option<&B> {
        match &self.0 {
            State::Here(memory) => Some(memory),
            State::Away(..) => None,
        }
    }

    /// As [`get`](Pending::get), to write.
    pub fn get_mut(&mut self) -> Option<&mut B> {
        match &mut self.0 {
            State::Here(memory) => Some(memory),
            State::Away(..) => None,
        }
    }
}

fn taken<B>(place: &Mutex<Option<B>>) -> Option<B> {
    place.lock().unwrap_or_else(PoisonError::into_inner).take()
}

/// Memory of the host that devices copy to and from.
pub trait HostMemory: Send + 'static {
    /// All bytes.
    fn bytes(&self) -> &[u8];

    /// All bytes, to write.
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
    fn memory_that_is_there_is_at_hand() {
        let place = |memory| Arc::new(Mutex::new(memory));
        assert_eq!(Pending::until(Event::DONE, place(Some(5))).get(), Some(&5));
        assert_eq!(Pending::<u8>::until(Event::DONE, place(None)).get(), None);
    }

    #[test]
    fn who_waits_is_woken_and_says_so() {
        let num_demands = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&num_demands);
        let latch = Latch::new(move || {
            counted.fetch_add(1, Ordering::Relaxed);
        });
        let event = latch.event();
        let woken = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&woken);
        event.on_done(move || {
            counted.fetch_add(1, Ordering::Relaxed);
        });
        event.demand();
        assert!(!event.is_done() && woken.load(Ordering::Relaxed) == 0);
        std::thread::scope(|scope| {
            scope.spawn(|| event.wait());
            latch.complete(Ok(()));
        });
        assert!(event.is_done() && woken.load(Ordering::Relaxed) == 1);
        assert!(num_demands.load(Ordering::Relaxed) >= 1);
    }

    #[test]
    fn a_failure_reaches_who_waits() {
        let latch = Latch::new(|| ());
        latch.complete(Err("a kernel panicked".to_owned()));
        assert_eq!(latch.event().failure().as_deref(), Some("a kernel panicked"));
        let failed = std::thread::spawn(move || latch.event().wait()).join().unwrap_err();
        assert_eq!(failed.downcast_ref::<String>().unwrap(), "a kernel panicked");
    }

    #[test]
    fn memory_comes_back_at_its_event() {
        let (latch, place) = (Latch::new(|| ()), Arc::new(Mutex::new(None)));
        let pending = Pending::until(latch.event(), Arc::clone(&place));
        assert!(pending.get().is_none());
        let mut pending = pending.try_take().unwrap_err();
        *place.lock().unwrap() = Some(vec![7]);
        latch.complete(Ok(()));
        pending.wait_mut().push(8);
        assert_eq!(pending.wait(), [7, 8]);
        assert_eq!(Pending::new(3).wait(), 3);
    }
}
