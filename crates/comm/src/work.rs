use crate::buffer::Storage;
use crate::call::Payload;
use crate::messages::MessageTicket;
use crate::queue::Ticket;
use crate::recorder::GroupRecorder;
use crate::{Buffer, BufferElement, CommError};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use trireme_base::{DType, EventCompleter, Journal, JournalEntry, Pending};

/// An operation that was issued and may not have completed. [`wait`](Work::wait) returns its result.
///
/// Dropping it drops only the result. The operation is not canceled, because the peers need it.
#[must_use = "an operation's result, or its failure, is seen by waiting for it"]
pub struct Work<T> {
    state: State<T>,
}

enum State<T> {
    Ready(Result<T, CommError>),
    /// An operation of a dry group. The wait for it is recorded in the journal.
    Dry {
        result: T,
        journal: Journal,
        number: usize,
    },
    Queued {
        ticket: Ticket,
        finish: fn(Payload) -> T,
    },
    Message {
        ticket: MessageTicket,
        finish: fn(Storage) -> T,
    },
}

impl<T> Work<T> {
    pub(crate) fn ready(result: Result<T, CommError>) -> Self {
        Work { state: State::Ready(result) }
    }

    pub(crate) fn dry(result: T, journal: Journal, number: usize) -> Self {
        Work { state: State::Dry { result, journal, number } }
    }

    pub(crate) fn queued(ticket: Ticket, finish: fn(Payload) -> T) -> Self {
        Work { state: State::Queued { ticket, finish } }
    }

    pub(crate) fn message(ticket: MessageTicket, finish: fn(Storage) -> T) -> Self {
        Work { state: State::Message { ticket, finish } }
    }

    /// Blocks until the operation has completed on this rank.
    ///
    /// If no thread is executing the group's next operation, the calling thread does, which is faster for short operations.
    ///
    /// # Errors
    /// The failure of this operation, or of an earlier one of the group.
    pub fn wait(self) -> Result<T, CommError> {
        match self.state {
            State::Ready(result) => result,
            State::Dry { result, journal, number } => {
                journal.record(JournalEntry::Await(number));
                Ok(result)
            }
            State::Queued { ticket, finish } => ticket.wait().map(finish),
            State::Message { ticket, finish } => ticket.wait().map(finish),
        }
    }

    /// Whether [`wait`](Work::wait) would return at once.
    pub fn is_done(&self) -> bool {
        match &self.state {
            State::Ready(_) | State::Dry { .. } => true,
            State::Queued { ticket, .. } => ticket.is_done(),
            State::Message { ticket, .. } => ticket.is_done(),
        }
    }
}

impl<T: BufferElement> Work<Buffer<T>> {
    /// Returns the vector, of `len` elements of `dtype`, as memory that becomes available at the operation's event, so that a device can
    /// read it without the host. The host must wait for the [`Outcome`] before it relies on any result computed from the vector.
    ///
    /// The group's own threads execute the operation. After a failure, the event completes as well, and the memory is a new vector of
    /// zeros, because peers may still access the original one.
    pub fn into_pending(self, dtype: DType, len: usize) -> (Pending<Buffer<T>>, Outcome) {
        let (completer, slot, result) =
            (EventCompleter::new(|| ()), Arc::new(Mutex::new(None)), Arc::new(OnceLock::new()));
        let pending = Pending::until(completer.event(), Arc::clone(&slot));
        let mut outcome = Outcome { recorder: None, result: Arc::clone(&result) };
        let end = move |vector: Result<Buffer<T>, CommError>| {
            let (vector, outcome) = match vector {
                Ok(vector) => (Ok(vector), Ok(())),
                Err(failure) => (Storage::heap(dtype, len).map(Buffer::from_storage), Err(failure)),
            };
            let placed =
                vector.map(|vector| *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(vector));
            let _ = result.set(outcome);
            completer.complete(placed.map_err(|failure| failure.to_string()));
        };
        match self.state {
            State::Queued { ticket, finish } => {
                outcome.recorder = Some(ticket.recorder().clone());
                ticket.on_done(Box::new(move |result| end(result.map(finish))));
            }
            State::Message { ticket, finish } => {
                ticket.on_done(Box::new(move |result| end(result.map(finish))));
            }
            // A dry group or a group of one rank returns the vector without accessing it, so a device may still use it. Waits for the
            // device.
            ended => end(Work { state: ended }.wait().and_then(|mut vector| vector.wait().map(|()| vector))),
        }
        (pending, outcome)
    }
}

/// The success or failure of an operation whose vector a device waits for.
#[must_use = "an operation's failure is seen by waiting for its outcome"]
pub struct Outcome {
    /// Set for a collective. Lets reports show that this thread waits.
    recorder: Option<GroupRecorder>,
    result: Arc<OnceLock<Result<(), CommError>>>,
}

impl Outcome {
    /// Blocks until the operation has completed on this rank.
    ///
    /// # Errors
    /// As [`Work::wait`].
    pub fn wait(self) -> Result<(), CommError> {
        let _wait = self.recorder.as_ref().map(GroupRecorder::wait);
        self.result.wait().clone()
    }
}
