//! The queue of a group's operations, and the threads that execute them.
//!
//! All operations of a group wait in one queue. The engine executes one at a time. The communication thread, or a thread that waits for a
//! result, takes the engine, executes the oldest operation and puts the engine back. Slots for operations are reused, so a steady state
//! allocates nothing.

use super::sync::{Condvar, Instant, Mutex, MutexGuard};
use crate::call::Callback;
use crate::call::Payload;
use crate::engine::{Engine, NOTICE_INTERVAL_MAX};
use crate::messages::MessageQueue;
use crate::recorder::{GroupRecorder, Issued};
use crate::{CommError, CommStatistics, Operation};
use slab::Slab;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// Number of preallocated slots: one pending operation per unit of a large model. The number of pending operations depends on timing, so
/// memory use could otherwise grow in any step.
const NUM_PREALLOCATED: usize = 1024;

/// Interval at which the communication thread polls for short operations, for [`POLL_DURATION`] after the last operation was issued.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
/// How long the communication thread polls after the last operation was issued.
const POLL_DURATION: Duration = Duration::from_millis(20);
/// Maximum bytes of a short operation. The communication thread is not woken for a short operation while it polls.
const SHORT_BYTES_MAX: usize = 64 << 10;

pub(crate) struct Queue {
    recorder: GroupRecorder,
    /// The group's messages, which fail when the group fails.
    messages: Arc<MessageQueue>,
    state: Mutex<State>,
    /// Notified when the communication thread may have something to do.
    submitted: Condvar,
    finished: Condvar,
}

/// The recent activity of the group, as the communication thread has observed it.
struct Activity {
    num_seen: u64,
    idle_since: Instant,
}

struct State {
    /// `None` while a thread executes an operation, and permanently after the group has ended.
    engine: Option<Engine>,
    slots: Slab<Slot>,
    queued: VecDeque<usize>,
    failure: Option<CommError>,
    /// The group has been dropped, so no more operations will be issued.
    closed: bool,
    /// The communication thread polls every [`POLL_INTERVAL`] and need not be woken for short operations.
    is_polled: bool,
    num_issued: u64,
    /// Number of threads that wait while another one executes.
    num_waiters: usize,
    statistics: CommStatistics,
}

struct Slot {
    progress: Progress,
    recipient: Recipient,
}

enum Recipient {
    /// The owner of the ticket, which waits for the result or will do so.
    Ticket,
    Dropped,
    /// Called as soon as the operation has ended.
    Callback(Callback<Payload>),
}

enum Progress {
    /// The operation is queued.
    Queued(Operation, Issued, Payload),
    /// Some thread executes the operation.
    Running,
    /// The result has not been fetched yet.
    Finished(Result<Payload, CommError>),
    /// The ticket's owner has the result and is about to free the slot.
    Taken,
}

/// A handle to the result of an operation. Frees the operation's slot when dropped.
pub(crate) struct Ticket {
    queue: Arc<Queue>,
    /// `None` once a callback receives the result.
    slot: Option<usize>,
}

impl Queue {
    pub(crate) fn new(engine: Engine, messages: Arc<MessageQueue>, recorder: GroupRecorder) -> Self {
        Queue {
            recorder,
            messages,
            state: Mutex::new(State {
                engine: Some(engine),
                slots: Slab::with_capacity(NUM_PREALLOCATED),
                queued: VecDeque::with_capacity(NUM_PREALLOCATED),
                failure: None,
                closed: false,
                is_polled: false,
                num_issued: 0,
                num_waiters: 0,
                statistics: CommStatistics::default(),
            }),
            submitted: Condvar::new(),
            finished: Condvar::new(),
        }
    }

    pub(crate) fn submit(self: &Arc<Self>, operation: Operation, payload: Payload) -> Ticket {
        let (dtype, len) = operation.elements();
        let ticket = self.enqueue(operation, payload);
        // Waking a thread takes longer than a short operation. The thread that issues a short operation usually waits for it at once, and
        // so executes it.
        if len * dtype.size() > SHORT_BYTES_MAX || !self.lock().is_polled {
            self.submitted.notify_one();
        }
        ticket
    }

    fn enqueue(self: &Arc<Self>, operation: Operation, payload: Payload) -> Ticket {
        let mut state = self.lock();
        let issued = match &state.failure {
            Some(failure) => Err(failure.clone()),
            None => self.recorder.issue(operation),
        };
        state.num_issued += 1;
        let is_waiting = issued.is_ok();
        let progress = match issued {
            Ok(issued) => Progress::Queued(operation, issued, payload),
            Err(failure) => Progress::Finished(Err(failure)),
        };
        let slot = state.fill_slot(progress);
        if is_waiting {
            state.queued.push_back(slot);
        }
        Ticket { queue: Arc::clone(self), slot: Some(slot) }
    }

    /// Runs the communication thread: executes operations until the queue is closed and empty, or has failed.
    pub(crate) fn serve(&self) {
        let mut state = self.lock();
        let mut activity = Activity { num_seen: 0, idle_since: Instant::now() };
        while state.failure.is_none() && !(state.closed && state.engine.is_some() && state.queued.is_empty())
        {
            state = match &state.engine {
                Some(_) if !state.queued.is_empty() => self.execute_oldest(state, false),
                _ => self.wait_and_read_notices(state, &mut activity),
            };
        }
        let (engine, failure) = (state.engine.take(), state.failure.clone());
        drop(state);
        engine.into_iter().for_each(|engine| engine.leave(failure.clone()));
    }

    /// Waits for something to do. Reads the peers' notices if nothing arrives for a while.
    fn wait_and_read_notices<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        activity: &mut Activity,
    ) -> MutexGuard<'a, State> {
        if activity.num_seen != state.num_issued {
            *activity = Activity { num_seen: state.num_issued, idle_since: Instant::now() };
        }
        state.is_polled = activity.idle_since.elapsed() < POLL_DURATION;
        let notice_interval = state.engine.as_ref().map_or(NOTICE_INTERVAL_MAX, Engine::notice_interval);
        let interval = if state.is_polled { POLL_INTERVAL } else { notice_interval };
        let waited = self.submitted.wait_timeout(state, interval);
        let (mut state, waited) = waited.expect("no thread panics while it holds the queue");
        let was_polling = std::mem::replace(&mut state.is_polled, false);
        if was_polling || !waited.timed_out() || !state.queued.is_empty() {
            return state;
        }
        let Some(mut engine) = state.engine.take() else { return state };
        drop(state);
        let guard = AbortOnPanic { queue: self, slot: None };
        let failure = engine.read_notices();
        std::mem::forget(guard);
        if let Some(failure) = failure {
            self.messages.abort(failure);
        }
        let mut state = self.lock();
        if state.failure.is_none() {
            state.engine = Some(engine);
        }
        // A thread that wanted to execute an operation meanwhile found no engine.
        self.wake_waiting(&state);
        state
    }

    /// Wakes the threads that wait for results. Notifying costs a system call even without waiting threads, so it is skipped then.
    fn wake_waiting(&self, state: &State) {
        if state.num_waiters > 0 {
            self.finished.notify_all();
        }
    }

    /// Lets the communication thread end after all issued operations.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.submitted.notify_one();
    }

    /// Fails all queued and later operations. Drops the engine without a goodbye, so that the peers notice. If an operation is running, its
    /// thread drops the engine afterwards.
    pub(crate) fn abort(&self, failure: CommError) {
        let engine = {
            let mut state = self.lock();
            state.fail(failure.clone());
            state.engine.take()
        };
        self.recorder.fail(&failure, None);
        drop(engine);
        self.submitted.notify_one();
        self.finished.notify_all();
    }

    pub(crate) fn statistics(&self) -> CommStatistics {
        self.lock().statistics
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread panics while it holds the queue")
    }

    /// Takes the engine, executes the oldest operation, and puts the engine back.
    fn execute_oldest<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        is_awaited: bool,
    ) -> MutexGuard<'a, State> {
        let slot = state.queued.pop_front().expect("the caller saw an operation waiting");
        let Progress::Queued(operation, issued, mut payload) = state.slots[slot].replace(Progress::Running)
        else {
            unreachable!("a queued slot holds an operation");
        };
        // In a panic, the engine is dropped before the payload: peers may still access the payload's memory until then.
        let mut engine = state.engine.take().expect("the caller saw the engine in its place");
        drop(state);

        let guard = AbortOnPanic { queue: self, slot: Some(slot) };
        let result = engine.execute(operation, issued, &mut payload, is_awaited);
        std::mem::forget(guard);

        let mut state = self.lock();
        state.statistics = engine.statistics;
        let was_aborted = state.failure.is_some();
        match result {
            Ok(()) => state.finish(slot, Ok(payload)),
            Err(failure) => {
                state.finish(slot, Err(failure.clone()));
                state.fail(failure.clone());
                self.messages.abort(failure);
            }
        }
        if !was_aborted {
            state.engine = Some(engine);
        }
        if !state.queued.is_empty() || state.closed || state.failure.is_some() {
            self.submitted.notify_one();
        }
        self.wake_waiting(&state);
        state
    }
}

impl State {
    fn fill_slot(&mut self, progress: Progress) -> usize {
        self.slots.insert(Slot { progress, recipient: Recipient::Ticket })
    }

    fn finish(&mut self, slot: usize, result: Result<Payload, CommError>) {
        match std::mem::replace(&mut self.slots[slot].recipient, Recipient::Ticket) {
            Recipient::Ticket => self.slots[slot].progress = Progress::Finished(result),
            Recipient::Dropped => drop(self.slots.remove(slot)),
            Recipient::Callback(callback) => {
                self.slots.remove(slot);
                callback(result);
            }
        }
    }

    /// Records the first failure, and fails all queued operations with it.
    fn fail(&mut self, failure: CommError) {
        let failure = self.failure.get_or_insert(failure).clone();
        while let Some(slot) = self.queued.pop_front() {
            self.finish(slot, Err(failure.clone()));
        }
    }
}

impl Slot {
    fn replace(&mut self, progress: Progress) -> Progress {
        std::mem::replace(&mut self.progress, progress)
    }
}

/// Aborts the queue if the engine panics: other threads may be waiting for results.
struct AbortOnPanic<'a> {
    queue: &'a Queue,
    slot: Option<usize>,
}

impl Drop for AbortOnPanic<'_> {
    fn drop(&mut self) {
        if let Some(slot) = self.slot {
            self.queue.lock().finish(slot, Err(CommError::Panicked));
        }
        self.queue.abort(CommError::Panicked);
    }
}

impl Ticket {
    pub(crate) fn is_done(&self) -> bool {
        matches!(self.queue.lock().slots[self.slot()].progress, Progress::Finished(_))
    }

    fn slot(&self) -> usize {
        self.slot.expect("a ticket with a callback is gone")
    }

    /// Calls `callback` with the result, on the thread that executes the operation and with the queue locked, so it must not use the group.
    /// Calls it at once if the operation has ended.
    pub(crate) fn on_done(mut self, callback: Callback<Payload>) {
        let mut state = self.queue.lock();
        let slot = &mut state.slots[self.slot()];
        if let Progress::Finished(_) = slot.progress {
            let Progress::Finished(result) = slot.replace(Progress::Taken) else { unreachable!() };
            drop(state);
            return callback(result);
        }
        slot.recipient = Recipient::Callback(callback);
        drop(state);
        self.slot = None;
        // This thread does not wait for the operation, so the communication thread executes it.
        self.queue.submitted.notify_one();
    }

    pub(crate) fn recorder(&self) -> &GroupRecorder {
        &self.queue.recorder
    }

    pub(crate) fn wait(self) -> Result<Payload, CommError> {
        let (queue, slot) = (&self.queue, self.slot());
        let _wait = queue.recorder.wait();
        let mut state = queue.lock();
        loop {
            match &state.slots[slot].progress {
                Progress::Finished(_) => break,
                Progress::Queued(..) if state.engine.is_some() => state = queue.execute_oldest(state, true),
                _ => {
                    state.num_waiters += 1;
                    state = queue.finished.wait(state).expect("no thread panics while it holds the queue");
                    state.num_waiters -= 1;
                }
            }
        }
        let Progress::Finished(result) = state.slots[slot].replace(Progress::Taken) else {
            unreachable!("the loop ends at a finished operation");
        };
        result
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let Some(slot) = self.slot else { return };
        let mut state = self.queue.lock();
        if matches!(state.slots[slot].progress, Progress::Finished(_) | Progress::Taken) {
            let result = state.slots.remove(slot);
            drop(state);
            drop(result);
        } else {
            state.slots[slot].recipient = Recipient::Dropped;
        }
    }
}
