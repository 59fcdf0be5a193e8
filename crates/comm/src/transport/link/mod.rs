//! A connection for data between two ranks: bytes in order, both ways.

mod ring;
mod socket;

pub(crate) use ring::RingLink;
pub(crate) use socket::SocketLink;

use rustix::event::PollFlags;
use std::os::fd::BorrowedFd;

/// The connection is of no more use: it ended, broke, or carries what it cannot.
#[derive(Debug)]
pub(crate) struct Broken;

/// What somebody waits for at a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Interest {
    /// That bytes can be sent.
    Send,
    /// That bytes have come.
    Receive,
}

/// One rank's end of a connection for data with a peer. Nothing here waits.
pub(crate) enum Link {
    /// Through the kernel.
    Socket(SocketLink),
    /// Through memory that both map.
    Ring(RingLink),
}

impl Link {
    /// Sends what goes of a header and its payload, and says how many bytes that was.
    pub(crate) fn send(&mut self, header: &[u8], payload: &[u8]) -> Result<usize, Broken> {
        match self {
            Link::Socket(link) => link.send(header, payload),
            Link::Ring(link) => link.send(header, payload),
        }
    }

    /// Receives what has come, and says how many bytes that was.
    pub(crate) fn receive(&mut self, bytes: &mut [u8]) -> Result<usize, Broken> {
        if bytes.is_empty() {
            return Ok(0);
        }
        match self {
            Link::Socket(link) => link.receive(bytes),
            Link::Ring(link) => link.receive(bytes),
        }
    }

    /// Says that the caller is about to sleep; whether it need not, because what it waits for is there.
    pub(crate) fn prepare_sleep(&mut self, interest: Interest) -> Result<bool, Broken> {
        match self {
            Link::Socket(_) => Ok(false),
            Link::Ring(link) => link.prepare_sleep(interest),
        }
    }

    /// The caller is awake again.
    pub(crate) fn end_sleep(&mut self, interest: Interest) {
        if let Link::Ring(link) = self {
            link.end_sleep(interest);
        }
    }

    /// What to poll while asleep.
    pub(crate) fn poll(&self, interest: Interest) -> (BorrowedFd<'_>, PollFlags) {
        match self {
            Link::Socket(link) => link.poll(interest),
            Link::Ring(link) => link.poll(),
        }
    }

    /// Whether looking again soon costs less than sleeping.
    pub(crate) fn is_worth_spinning(&self) -> bool {
        matches!(self, Link::Ring(_))
    }
}
