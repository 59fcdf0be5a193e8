use crate::CommError;
use crate::buffer::Storage;
use crate::engine::Payload;
use crate::messages::Receipt;
use crate::queue::Ticket;
use trireme_base::{Journal, JournalEntry};

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
    Pending {
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

    pub(crate) fn pending(ticket: Ticket, finish: fn(Payload) -> T) -> Self {
        Work { state: State::Pending { ticket, finish } }
    }

    pub(crate) fn message(receipt: Receipt, finish: fn(Storage) -> T) -> Self {
        Work { state: State::Message { receipt, finish } }
    }

    /// Blocks until the operation has ended on this rank.
    ///
    /// If nobody executes the group's next operation yet, the calling thread does: for short operations
    /// that saves the way to the communication thread and back.
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
            State::Pending { ticket, finish } => ticket.wait().map(finish),
            State::Message { receipt, finish } => receipt.wait().map(finish),
        }
    }

    /// Whether [`wait`](Work::wait) would return at once.
    pub fn is_done(&self) -> bool {
        match &self.state {
            State::Ready(_) | State::Dry { .. } => true,
            State::Pending { ticket, .. } => ticket.is_done(),
            State::Message { receipt, .. } => receipt.is_done(),
        }
    }
}
