use crate::buffer::Storage;
use crate::call::Payload;
use crate::messages::Receipt;
use crate::queue::Ticket;
use crate::recorder::GroupRecorder;
use crate::{Buffer, CommError, Content};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use trireme_base::{DType, Journal, JournalEntry, Latch, Pending};

/// An operation that was issued and may not have ended; `wait` gives its result.
///
/// Dropping it does not cancel the operation, for the peers need it: it only drops the result.
#[must_use = "an operation's result, or its failure, is seen by waiting for it"]
pub struct Work<T> {
    state: State<T>,
}

enum State<T> {
    Ready(Result<T, CommError>),
    /// Of a dry group, which notes that it is waited for.
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
        receipt: Receipt,
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

    pub(crate) fn message(receipt: Receipt, finish: fn(Storage) -> T) -> Self {
        Work { state: State::Message { receipt, finish } }
    }

    /// Blocks until the operation has ended on this rank.
    ///
    /// If no thread executes the group's next operation, this one does, which is quicker for short operations.
    ///
    /// # Errors
    /// The operation's failure, or that of an earlier one of the group.
    pub fn wait(self) -> Result<T, CommError> {
        match self.state {
            State::Ready(result) => result,
            State::Dry { result, journal, number } => {
                journal.note(JournalEntry::Await(number));
                Ok(result)
            }
            State::Queued { ticket, finish } => ticket.wait().map(finish),
            State::Message { receipt, finish } => receipt.wait().map(finish),
        }
    }

    /// Whether [`wait`](Work::wait) would return at once.
    pub fn is_done(&self) -> bool {
        match &self.state {
            State::Ready(_) | State::Dry { .. } => true,
            State::Queued { ticket, .. } => ticket.is_done(),
            State::Message { receipt, .. } => receipt.is_done(),
        }
    }
}

impl<T: Content> Work<Buffer<T>> {
    /// The vector, of `len` elements of `dtype`, as memory that comes back at the operation's event, so that a device reads it without the
    /// host; and the outcome, which the host asks for before it relies on anything that was made of the vector.
    ///
    /// The group's own threads execute the operation. After a failure the event is done all the same, and zeros are in the place
    /// of the vector, whose memory peers may still work with.
    pub fn into_pending(self, dtype: DType, len: usize) -> (Pending<Buffer<T>>, Outcome) {
        let (latch, place, result) =
            (Latch::new(|| ()), Arc::new(Mutex::new(None)), Arc::new(OnceLock::new()));
        let pending = Pending::until(latch.event(), Arc::clone(&place));
        let mut outcome = Outcome { recorder: None, result: Arc::clone(&result) };
        let end = move |vector: Result<Buffer<T>, CommError>| {
            let (vector, outcome) = match vector {
                Ok(vector) => (Ok(vector), Ok(())),
                Err(failure) => (Storage::heap(dtype, len).map(Buffer::from_storage), Err(failure)),
            };
            let placed =
                vector.map(|vector| *place.lock().unwrap_or_else(PoisonError::into_inner) = Some(vector));
            let _ = result.set(outcome);
            latch.complete(placed.map_err(|failure| failure.to_string()));
        };
        match self.state {
            State::Queued { ticket, finish } => {
                outcome.recorder = Some(ticket.recorder().clone());
                ticket.on_done(Box::new(move |result| end(result.map(finish))));
            }
            State::Message { receipt, finish } => {
                receipt.on_done(Box::new(move |result| end(result.map(finish))));
            }
            // A group of one rank does not touch the vector, which a device may still work with.
            ended => end(Work { state: ended }.wait().map(|vector| vector.into_memory().wait())),
        }
        (pending, outcome)
    }
}

/// What came of an operation whose vector a device waits for.
#[must_use = "an operation's failure is seen by waiting for its outcome"]
pub struct Outcome {
    /// Of a collective operation, for reports of ranks that wait for each other.
    recorder: Option<GroupRecorder>,
    result: Arc<OnceLock<Result<(), CommError>>>,
}

impl Outcome {
    /// Blocks until the operation has ended on this rank.
    ///
    /// # Errors
    /// As [`Work::wait`].
    pub fn wait(self) -> Result<(), CommError> {
        let _wait = self.recorder.as_ref().map(GroupRecorder::wait);
        self.result.wait().clone()
    }
}
