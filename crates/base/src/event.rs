//! Points in the work of devices and groups, and host memory that is lent until one of them.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// A point in the work of a device or a group: it has come, or it comes when what was issued before it has ended.
///
/// Clones are one event. An event of a device that works while it is called has always come, and costs nothing.
#[derive(Clone, Default)]
pub struct Event(Option<Arc<Latch>>);

impl Event {
    /// One that has come.
    pub const DONE: Event = Event(None);

    /// Whether it has come.
    pub fn is_done(&self) -> bool {
        self.0.as_ref().is_none_or(|latch| latch.lock().outcome.is_some())
    }

    /// Waits until it has come.
    ///
    /// # Panics
    /// If what was to come before it panicked.
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
                None => state = latch.came.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    /// Tells who works towards it that somebody waits.
    pub fn demand(&self) {
        if let Some(latch) = &self.0 {
            latch.demand();
        }
    }

    /// Has `wake` called once when it comes; at once if it has come.
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

    /// Whether both are the same point.
    pub fn is_same(&self, other: &Event) -> bool {
        match (&self.0, &other.0) {
            (Some(own), Some(other)) => Arc::ptr_eq(own, other),
            (own, other) => own.is_none() && other.is_none(),
        }
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_done() { "Event(done)" } else { "Event(to come)" })
    }
}

/// Lets an [`Event`] come.
#[derive(Default)]
pub struct Latch {
    state: Mutex<LatchState>,
    came: Condvar,
    /// Tells who works towards the event that somebody waits.
    on_demand: Option<Box<dyn Fn() + Send + Sync>>,
}

type Wake = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct LatchState {
    /// What came; of a failure its cause.
    outcome: Option<Result<(), String>>,
    wakes: Vec<Wake>,
}

impl Latch {
    /// One that has not come.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// As [`new`](Latch::new); `on_demand` is called when somebody waits for it.
    pub fn with_demand(on_demand: impl Fn() + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Latch { on_demand: Some(Box::new(on_demand)), ..Latch::default() })
    }

    /// The event.
    pub fn event(self: &Arc<Self>) -> Event {
        Event(Some(Arc::clone(self)))
    }

    /// The event has come, or what was to come before it has failed. The first outcome stays.
    pub fn open(&self, outcome: Result<(), String>) {
        let mut state = self.lock();
        state.outcome.get_or_insert(outcome);
        let wakes = std::mem::take(&mut state.wakes);
        drop(state);
        self.came.notify_all();
        wakes.into_iter().for_each(|wake| wake());
    }

    fn demand(&self) {
        if let Some(on_demand) = self.on_demand.as_ref().filter(|_| self.lock().outcome.is_none()) {
            on_demand();
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

/// Host memory that a device may still work with. Whoever wants it waits until the device has ended.
#[derive(Debug)]
pub struct Held<B>(State<B>);

#[derive(Debug)]
enum State<B> {
    Here(B),
    /// The device puts it there before the event.
    Lent(Arc<Mutex<Option<B>>>, Event),
}

impl<B> Held<B> {
    /// Memory that nobody works with.
    pub fn new(memory: B) -> Self {
        Held(State::Here(memory))
    }

    /// Memory that will lie in `place` when `until` comes.
    pub fn lent(place: Arc<Mutex<Option<B>>>, until: Event) -> Self {
        Held(State::Lent(place, until))
    }

    /// When it comes back.
    pub fn until(&self) -> Event {
        match &self.0 {
            State::Here(_) => Event::DONE,
            State::Lent(_, until) => until.clone(),
        }
    }

    /// Waits until nobody works with it.
    ///
    /// # Panics
    /// If the device failed.
    pub fn wait(self) -> B {
        match self.0 {
            State::Here(memory) => memory,
            State::Lent(place, until) => {
                until.wait();
                let memory = place.lock().unwrap_or_else(PoisonError::into_inner).take();
                memory.expect("a device gives back what was lent to it before the event")
            }
        }
    }

    /// The memory, or this if a device may still work with it.
    ///
    /// # Errors
    /// This.
    pub fn try_get(self) -> Result<B, Self> {
        match self.0 {
            State::Here(memory) => Ok(memory),
            lent @ State::Lent(..) => Err(Held(lent)),
        }
    }

    /// The memory, if the event has come.
    pub fn try_take(self) -> Option<B> {
        match self.0 {
            State::Here(memory) => Some(memory),
            State::Lent(place, _) => place.lock().unwrap_or_else(PoisonError::into_inner).take(),
        }
    }

    /// The memory, if nobody works with it.
    pub fn get(&self) -> Option<&B> {
        match &self.0 {
            State::Here(memory) => Some(memory),
            State::Lent(..) => None,
        }
    }

    /// As [`get`](Held::get), to write.
    pub fn get_mut(&mut self) -> Option<&mut B> {
        match &mut self.0 {
            State::Here(memory) => Some(memory),
            State::Lent(..) => None,
        }
    }
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

impl<B> From<B> for Held<B> {
    fn from(memory: B) -> Self {
        Held::new(memory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn who_waits_is_woken_and_says_so() {
        let num_demands = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&num_demands);
        let latch = Latch::with_demand(move || {
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
            latch.open(Ok(()));
        });
        assert!(event.is_done() && woken.load(Ordering::Relaxed) == 1);
        assert!(num_demands.load(Ordering::Relaxed) >= 1);
        assert!(event.is_same(&event.clone()) && !event.is_same(&Event::DONE));
    }

    #[test]
    fn a_failure_reaches_who_waits() {
        let latch = Latch::new();
        latch.open(Err("a kernel panicked".to_owned()));
        let failed = std::thread::spawn(move || latch.event().wait()).join().unwrap_err();
        assert_eq!(failed.downcast_ref::<String>().unwrap(), "a kernel panicked");
    }

    #[test]
    fn lent_memory_comes_back_at_its_event() {
        let (latch, place) = (Latch::new(), Arc::new(Mutex::new(None)));
        let held = Held::lent(Arc::clone(&place), latch.event());
        assert!(held.get().is_none());
        *place.lock().unwrap() = Some(vec![7]);
        latch.open(Ok(()));
        assert_eq!(held.wait(), [7]);
        assert_eq!(Held::from(3).wait(), 3);
    }
}
