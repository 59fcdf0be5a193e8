//! Point-to-point messages between ranks of a group, independent of its collectives.
//!
//! A message engine moves all messages concurrently. The engine runs on a thread that waits for a message, or else on the message thread.
//! Messages have their own links, so messages and collectives do not wait for each other. A rank may issue its messages in any order, but
//! the messages from one rank to another must be sent and received in the same order.

mod device_lane;
mod message_engine;

use crate::buffer::Storage;
use crate::call::Callback;
use crate::recorder::{Direction, GroupRecorder};
use crate::transport::device::DeviceResources;
use crate::transport::link::Link;
use crate::{CommError, GroupOptions, Operation};
use message_engine::{MessageEngine, NUM_PREALLOCATED, PendingMessage};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::{read, write};
use slab::Slab;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;
use trireme_base::{Rank, spawn_thread};

pub(crate) struct Messenger {
    pub(crate) message_queue: Arc<MessageQueue>,
    thread: Option<JoinHandle<()>>,
}

/// The pending messages of a rank, and the state that its threads share.
pub(crate) struct MessageQueue {
    recorder: GroupRecorder,
    state: Mutex<State>,
    /// Notified when there may be work for the message thread.
    submitted: Condvar,
    /// Notified when a message has ended or the message engine is available.
    finished: Condvar,
    wakeup: OwnedFd,
}

struct State {
    /// `None` while a thread moves messages, and after a failure.
    engine: Option<MessageEngine>,
    /// Messages that were issued and not yet passed to the message engine.
    submitted: VecDeque<PendingMessage>,
    slots: Slab<Slot>,
    num_pending: usize,
    /// For each peer: number of messages issued to it and from it, indexed by [`Direction`].
    num_issued: Vec<[u64; 2]>,
    /// Number of threads that wait for a message. One of them runs the message engine.
    num_waiting: usize,
    is_asleep: bool,
    is_closed: bool,
    failure: Option<CommError>,
}

enum Slot {
    Pending,
    /// The ticket was dropped, so the result will be dropped, too.
    Abandoned,
    /// Called as soon as the message has ended.
    Callback(Callback<Storage>),
    Ended(Result<Storage, CommError>),
    /// The owner has the result and is about to free the slot.
    Taken,
}

/// A handle to the result of a message. Frees the message's slot when dropped.
pub(crate) struct MessageTicket {
    queue: Arc<MessageQueue>,
    /// `None` once a callback receives the result.
    slot: Option<usize>,
}

impl Messenger {
    pub(crate) fn start(
        own: Rank,
        links: Vec<Option<Link>>,
        devices: DeviceResources,
        options: &GroupOptions,
        recorder: GroupRecorder,
    ) -> Result<Self, CommError> {
        let failed = |source| CommError::Spawn { source: Arc::new(source) };
        let num_issued = vec![[0; 2]; links.len()];
        let engine = MessageEngine::new(own, links, devices, options, recorder.clone())?;
        let wakeup = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let queue = Arc::new(MessageQueue {
            recorder,
            state: Mutex::new(State {
                engine: Some(engine),
                submitted: VecDeque::with_capacity(NUM_PREALLOCATED),
                slots: Slab::with_capacity(NUM_PREALLOCATED),
                num_pending: 0,
                num_issued,
                num_waiting: 0,
                is_asleep: false,
                is_closed: false,
                failure: None,
            }),
            submitted: Condvar::new(),
            finished: Condvar::new(),
            wakeup: wakeup.map_err(|error| failed(error.into()))?,
        });
        let served = Arc::clone(&queue);
        let name = format!("messages-{own}");
        let thread = spawn_thread(&name, move || served.serve()).map_err(failed)?;
        Ok(Messenger { message_queue: queue, thread: Some(thread) })
    }

    /// Issues a message to or from `peer`.
    pub(crate) fn submit(
        &self,
        direction: Direction,
        peer: Rank,
        operation: Operation,
        storage: Storage,
    ) -> MessageTicket {
        let queue = &self.message_queue;
        let mut state = queue.lock();
        let failure = state.failure.clone();
        let slot = state.slots.insert(failure.map_or(Slot::Pending, |failure| Slot::Ended(Err(failure))));
        if state.failure.is_none() {
            let issued = Instant::now();
            let num_issued = &mut state.num_issued[peer.0][direction as usize];
            let event = storage.event();
            if !event.is_done() {
                event.demand();
                let queue = Arc::clone(queue);
                event.on_done(move || queue.wake());
            }
            let number = queue.recorder.issue_message(direction, peer, *num_issued, operation, issued);
            *num_issued += 1;
            state
                .submitted
                .push_back(PendingMessage::new(slot, direction, peer, operation, storage, issued, number));
            state.num_pending += 1;
            if state.is_asleep {
                queue.wake();
            } else {
                queue.submitted.notify_one();
            }
        }
        drop(state);
        MessageTicket { queue: Arc::clone(queue), slot: Some(slot) }
    }
}

impl Drop for Messenger {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.message_queue.recorder.fail(&CommError::Panicked, None);
            self.message_queue.abort(CommError::Panicked);
            return;
        }
        self.message_queue.lock().is_closed = true;
        self.message_queue.wake_all();
        let ended = self.thread.take().map(JoinHandle::join);
        assert!(!matches!(ended, Some(Err(_))), "the message engine's thread panicked; its message is above");
    }
}

impl MessageQueue {
    /// Fails all pending and all later messages, because the group has failed.
    pub(crate) fn abort(&self, failure: CommError) {
        self.lock().fail(failure);
        self.wake_all();
    }

    /// The failure that all later messages return.
    pub(crate) fn failure(&self) -> Option<CommError> {
        self.lock().failure.clone()
    }

    /// Locks the state, even if it is poisoned: a panic fails the group, and other threads must still receive that failure.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the thread that runs the message engine, best effort: a write fails only if the counter is at its maximum, and then the thread
    /// wakes anyway.
    fn wake(&self) {
        let _ = write(&self.wakeup, &1_u64.to_ne_bytes());
    }

    fn wake_all(&self) {
        self.wake();
        self.submitted.notify_all();
        self.finished.notify_all();
    }

    /// Runs the message thread: moves messages while no thread waits for one.
    fn serve(&self) {
        let mut state = self.lock();
        while state.failure.is_none() && !(state.is_closed && state.num_pending == 0) {
            let has_work = state.num_pending > 0 && state.num_waiting == 0;
            state = match state.engine.take_if(|_| has_work) {
                Some(engine) => self.run_engine(state, engine, false, |state| state.num_waiting > 0),
                None => self.submitted.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
        // Dropping the engine closes its connections.
        let engine = state.engine.take();
        drop(state);
        drop(engine);
    }

    /// Moves messages until there are none, or `should_stop`. `is_awaited` says whether this rank has no other work.
    fn run_engine<'a>(
        &'a self,
        state: MutexGuard<'a, State>,
        mut engine: MessageEngine,
        is_awaited: bool,
        should_stop: impl Fn(&State) -> bool,
    ) -> MutexGuard<'a, State> {
        let guard = AbortOnPanic(self);
        // A panic drops variables in reverse order, so the lock is released before the guard locks it.
        let mut state = state;
        let mut may_sleep = false;
        let result = loop {
            state.exchange(&mut engine);
            self.finished.notify_all();
            if should_stop(&state) || engine.is_idle() || state.failure.is_some() {
                break Ok(());
            }
            state.is_asleep = may_sleep;
            drop(state);
            let moved = if may_sleep { engine.sleep(&self.wakeup).map(|()| true) } else { engine.advance() };
            if may_sleep {
                // Resets the event. Its cause is found in the shared state.
                let _ = read(&self.wakeup, &mut [0_u8; 8]);
            }
            may_sleep = matches!(moved, Ok(false)) && !engine.poll_links(is_awaited);
            state = self.lock();
            state.is_asleep = false;
            if let Err(failure) = moved {
                drop(state);
                self.recorder.fail(&failure, engine.failed);
                state = self.lock();
                break Err(failure);
            }
        };
        std::mem::forget(guard);
        match result {
            Err(failure) => state.fail(failure),
            Ok(()) if state.failure.is_none() => state.engine = Some(engine),
            Ok(()) => {}
        }
        self.finished.notify_all();
        self.submitted.notify_one();
        state
    }
}

/// Fails the group if the message engine panics: other threads may be waiting for messages.
struct AbortOnPanic<'a>(&'a MessageQueue);

impl Drop for AbortOnPanic<'_> {
    fn drop(&mut self) {
        self.0.recorder.fail(&CommError::Panicked, None);
        self.0.abort(CommError::Panicked);
    }
}

impl State {
    /// Passes issued messages to the engine, and collects completed ones.
    fn exchange(&mut self, engine: &mut MessageEngine) {
        self.submitted.drain(..).for_each(|pending| engine.enqueue(pending));
        for (slot, storage) in engine.ended.drain(..) {
            // The group may have failed meanwhile, and this message with it.
            if self.end(slot, Ok(storage)) {
                self.num_pending -= 1;
            }
        }
    }

    /// Records the first failure, and fails all pending messages with it.
    fn fail(&mut self, failure: CommError) {
        let failure = self.failure.get_or_insert(failure).clone();
        self.submitted.clear();
        self.num_pending = 0;
        let slots: Vec<usize> = self.slots.iter().map(|(slot, _)| slot).collect();
        for slot in slots {
            self.end(slot, Err(failure.clone()));
        }
    }

    /// Passes on the result of a message. Returns false if the message had already ended.
    fn end(&mut self, slot: usize, result: Result<Storage, CommError>) -> bool {
        let Some(known) = self.slots.get_mut(slot) else { return false };
        match std::mem::replace(known, Slot::Taken) {
            Slot::Pending => *known = Slot::Ended(result),
            Slot::Abandoned => drop(self.slots.remove(slot)),
            Slot::Callback(callback) => {
                self.slots.remove(slot);
                callback(result);
            }
            ended @ (Slot::Ended(_) | Slot::Taken) => {
                *known = ended;
                return false;
            }
        }
        true
    }
}

impl MessageTicket {
    pub(crate) fn is_done(&self) -> bool {
        matches!(self.queue.lock().slots[self.slot()], Slot::Ended(_))
    }

    fn slot(&self) -> usize {
        self.slot.expect("a ticket with a callback is gone")
    }

    /// Calls `callback` with the result, on the thread that moves the message and with the state locked, so it must not use the group.
    /// Calls it at once if the message has ended.
    pub(crate) fn on_done(mut self, callback: Callback<Storage>) {
        let mut state = self.queue.lock();
        let slot = &mut state.slots[self.slot()];
        if let Slot::Pending = slot {
            *slot = Slot::Callback(callback);
            drop(state);
            self.slot = None;
            return;
        }
        let Slot::Ended(result) = std::mem::replace(slot, Slot::Taken) else {
            unreachable!("a message that has its ticket is pending, or has ended")
        };
        drop(state);
        callback(result);
    }

    pub(crate) fn wait(self) -> Result<Storage, CommError> {
        let (queue, slot) = (&self.queue, self.slot());
        let is_done = |state: &State| matches!(state.slots[slot], Slot::Ended(_));
        let mut state = queue.lock();
        state.num_waiting += 1;
        while !is_done(&state) {
            state = match state.engine.take() {
                Some(engine) => queue.run_engine(state, engine, true, is_done),
                None => {
                    // If the message thread runs the engine, it stops and leaves the engine to a waiting thread.
                    queue.wake();
                    queue.finished.wait(state).unwrap_or_else(PoisonError::into_inner)
                }
            };
        }
        state.num_waiting -= 1;
        if state.num_waiting == 0 && state.num_pending > 0 {
            queue.submitted.notify_one();
        }
        match std::mem::replace(&mut state.slots[slot], Slot::Taken) {
            Slot::Ended(result) => result,
            _ => unreachable!("the loop ends when the message has"),
        }
    }
}

impl Drop for MessageTicket {
    fn drop(&mut self) {
        let Some(slot) = self.slot else { return };
        let mut state = self.queue.lock();
        match state.slots[slot] {
            Slot::Ended(_) | Slot::Taken => drop(state.slots.remove(slot)),
            _ => state.slots[slot] = Slot::Abandoned,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recorder::FlightRecorder;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use trireme_base::DType;

    /// Creates a messenger without the link that it needs, so a thread that moves a message panics. Also returns the group's recorder.
    fn without_links() -> (Messenger, GroupRecorder) {
        let recorder = FlightRecorder::new(Rank(0), 2);
        let world = recorder.group("world".to_owned(), Rank(0), vec![Rank(0), Rank(1)]);
        let (links, devices, options) =
            (vec![None, None], DeviceResources::default(), GroupOptions::default());
        let messenger = Messenger::start(Rank(0), links, devices, &options, world.clone()).unwrap();
        (messenger, world)
    }

    #[test]
    fn a_panic_of_the_engine_fails_waiting_threads_and_the_group() {
        let (messenger, world) = without_links();
        let send = || {
            let operation = Operation::message(DType::U8, 1);
            messenger.submit(Direction::Send, Rank(1), operation, Storage::heap(DType::U8, 1).unwrap())
        };
        let (first, second) = (send(), send());
        // Panics here, unless the message thread was faster.
        let first = catch_unwind(AssertUnwindSafe(|| first.wait()));
        assert!(!matches!(first, Ok(Ok(_))));
        assert!(matches!(second.wait(), Err(CommError::Panicked)));
        assert!(matches!(send().wait(), Err(CommError::Panicked)));
        assert!(matches!(world.issue(Operation::BARRIER), Err(CommError::Panicked)));
        let _ = catch_unwind(AssertUnwindSafe(|| drop(messenger)));
    }

    #[test]
    fn a_panic_with_the_queue_locked_is_a_failure_and_not_a_deadlock() {
        let (messenger, world) = without_links();
        let queue = &messenger.message_queue;
        let mut state = queue.lock();
        let engine = state.engine.take().expect("nobody moves messages while there are none");
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            drop(queue.run_engine(state, engine, true, |_| panic!("the queue is locked here")));
        }));
        assert!(panicked.is_err());
        assert!(matches!(queue.failure(), Some(CommError::Panicked)));
        let operation = Operation::message(DType::U8, 1);
        let sent =
            messenger.submit(Direction::Send, Rank(1), operation, Storage::heap(DType::U8, 1).unwrap());
        assert!(matches!(sent.wait(), Err(CommError::Panicked)));
        assert!(matches!(world.issue(Operation::BARRIER), Err(CommError::Panicked)));
    }
}
