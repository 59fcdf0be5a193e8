//! A connection for data between two ranks: bytes in order, both ways.

mod interest;
mod lent;
mod notifications;
mod ring;
mod socket;
mod striped;
#[cfg_attr(not(feature = "tls"), path = "no_tls.rs")]
mod tls;

pub(crate) use interest::{Broken, Interest, Side};
pub(crate) use ring::RingLink;
pub(crate) use socket::SocketLink;
pub(crate) use striped::StripedLink;
pub(crate) use tls::{Tls, TlsLink};

use super::mpi::{MpiLink, NAP};
use rustix::event::PollFlags;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

/// One rank's end of a connection for data with a peer. Nothing here waits.
pub(crate) enum Link {
    Socket(SocketLink),
    /// Through the kernel, encrypted.
    Tls(Box<TlsLink>),
    /// Through memory that both map.
    Ring(RingLink),
    Mpi(MpiLink),
    /// Several, through the kernel.
    Striped(StripedLink),
}

const DATA_BY_TCP: &str = "only connections for data by TCP are encrypted or striped";

/// A connection with a peer that has been made, and is to become a link or carry notices.
pub(crate) enum Connection {
    Plain(OwnedFd),
    Encrypted(Box<TlsLink>),
    /// Several of the former, in the same order on both sides.
    Striped(Vec<Connection>),
}

impl Connection {
    /// The socket of a connection that is never encrypted nor striped: for notices, within a host, or beside MPI.
    ///
    /// # Panics
    /// If it is another one.
    pub(crate) fn socket(&self) -> &OwnedFd {
        match self {
            Connection::Plain(socket) => socket,
            Connection::Encrypted(_) | Connection::Striped(_) => unreachable!("{DATA_BY_TCP}"),
        }
    }

    /// As [`socket`](Connection::socket).
    ///
    /// # Panics
    /// If it is another one.
    pub(crate) fn into_socket(self) -> OwnedFd {
        match self {
            Connection::Plain(socket) => socket,
            Connection::Encrypted(_) | Connection::Striped(_) => unreachable!("{DATA_BY_TCP}"),
        }
    }

    /// The link through the kernel that the connection is; with `zero_copy` the kernel need not copy what is sent.
    pub(crate) fn into_link(self, zero_copy: bool) -> Link {
        match self {
            Connection::Plain(socket) => Link::Socket(SocketLink::new(socket, zero_copy)),
            Connection::Encrypted(link) => Link::Tls(link),
            Connection::Striped(connections) => {
                // A stripe that is lent would hold up its connection's next one until it has been acknowledged.
                let links = connections.into_iter().map(|connection| connection.into_link(false)).collect();
                Link::Striped(StripedLink::new(links))
            }
        }
    }
}

impl Link {
    /// Sends what goes of a header and its payload, and says how many bytes that was. The next call begins with the
    /// byte after those; what was given stays where and as it is until then.
    ///
    /// With `may_lend`, what was given may count as sent only once the peer has received it. Never where the peer receives
    /// only after some of it counts as sent: both would wait.
    pub(crate) fn send(&mut self, header: &[u8], payload: &[u8], may_lend: bool) -> Result<usize, Broken> {
        match self {
            Link::Socket(link) => link.send(header, payload, may_lend),
            Link::Tls(link) => link.send(header, payload).map_err(|_| Broken),
            Link::Ring(link) => link.send(header, payload),
            Link::Mpi(link) => link.send(header, payload),
            Link::Striped(link) => link.send(header, payload),
        }
    }

    /// Receives what has come of a header, and says how many bytes that was.
    pub(crate) fn receive_header(&mut self, header: &mut [u8]) -> Result<usize, Broken> {
        match self {
            Link::Mpi(link) => link.receive_header(header),
            link => link.receive(header),
        }
    }

    /// Receives what has come of a payload; returns the bytes. The next call is for the rest, whose memory nothing else uses.
    pub(crate) fn receive(&mut self, bytes: &mut [u8]) -> Result<usize, Broken> {
        if bytes.is_empty() {
            return Ok(0);
        }
        match self {
            Link::Socket(link) => link.receive(bytes),
            Link::Tls(link) => link.receive(bytes).map_err(|_| Broken),
            Link::Ring(link) => link.receive(bytes),
            Link::Mpi(link) => link.receive(bytes),
            Link::Striped(link) => link.receive(bytes),
        }
    }

    /// Says that the caller is about to sleep; whether it need not, because what it waits for is there.
    pub(crate) fn prepare_sleep(&mut self, interest: Interest) -> Result<bool, Broken> {
        let Link::Ring(link) = self else { return Ok(false) };
        link.prepare_sleep(interest)
    }

    /// The caller is awake again.
    pub(crate) fn end_sleep(&mut self, interest: Interest) {
        match self {
            Link::Socket(_) | Link::Tls(_) | Link::Striped(_) => {}
            Link::Ring(link) => link.end_sleep(interest),
            Link::Mpi(link) => link.end_sleep(),
        }
    }

    /// What to poll while asleep.
    pub(crate) fn poll(&self, interest: Interest) -> (BorrowedFd<'_>, PollFlags) {
        match self {
            Link::Socket(link) => link.poll(interest),
            Link::Tls(link) => link.poll(interest),
            Link::Ring(link) => link.poll(),
            Link::Mpi(link) => link.poll(),
            Link::Striped(link) => link.poll(interest),
        }
    }

    /// How long to sleep at most, if nothing wakes the sleeper when bytes have come.
    pub(crate) fn nap(&self) -> Option<Duration> {
        matches!(self, Link::Mpi(_)).then_some(NAP)
    }

    /// Whether looking again soon costs less than sleeping.
    pub(crate) fn is_worth_looking(&self) -> bool {
        matches!(self, Link::Ring(_))
    }

    /// Whether only a try shows that bytes can be sent or have come.
    pub(crate) fn must_be_tried(&self) -> bool {
        matches!(self, Link::Mpi(_))
    }

    /// Ends the use of the link. Returns whether others may still access memory passed to it, which then must never be freed.
    pub(crate) fn abandon(&mut self) -> bool {
        match self {
            Link::Tls(_) | Link::Ring(_) | Link::Striped(_) => false,
            Link::Socket(link) => link.has_lent(),
            Link::Mpi(link) => link.abandon(),
        }
    }

    /// Whether what somebody waits for is there, as far as that can be seen without the kernel.
    pub(crate) fn is_ready(&self, interest: Interest) -> bool {
        matches!(self, Link::Ring(link) if link.is_ready(interest))
    }
}
