//! Data connections between two ranks: ordered byte streams in both directions.

mod notifications;
mod ring;
mod socket;
mod striped;
#[cfg_attr(not(feature = "tls"), path = "no_tls.rs")]
mod tls;
mod types;
mod zero_copy;

pub(crate) use ring::RingLink;
pub(crate) use socket::SocketLink;
pub(crate) use striped::StripedLink;
pub(crate) use tls::{Tls, TlsLink};
pub(crate) use types::{Broken, ConnectionSide, Interest};

use super::mpi::{MpiLink, POLL_INTERVAL};
use rustix::event::PollFlags;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

/// One rank's end of a data connection to a peer. All methods are non-blocking.
pub(crate) enum Link {
    Socket(SocketLink),
    /// An encrypted socket.
    Tls(Box<TlsLink>),
    /// Rings in memory that both ranks map.
    Ring(RingLink),
    Mpi(MpiLink),
    /// Several socket links, used as one.
    Striped(StripedLink),
}

const DATA_BY_TCP: &str = "only connections for data by TCP are encrypted or striped";

/// An established connection to a peer, which will become a link or carry notices.
pub(crate) enum Connection {
    Plain(OwnedFd),
    Encrypted(Box<TlsLink>),
    /// Several connections of the other kinds, in the same order on both sides.
    Striped(Vec<Connection>),
}

impl Connection {
    /// The socket of a connection that is never encrypted or striped: a control connection, a connection within a host, or a connection to
    /// a peer with which MPI exchanges the data.
    ///
    /// # Panics
    /// If the connection is encrypted or striped.
    pub(crate) fn socket(&self) -> &OwnedFd {
        match self {
            Connection::Plain(socket) => socket,
            Connection::Encrypted(_) | Connection::Striped(_) => unreachable!("{DATA_BY_TCP}"),
        }
    }

    /// Like [`socket`](Connection::socket), by value.
    ///
    /// # Panics
    /// If the connection is encrypted or striped.
    pub(crate) fn into_socket(self) -> OwnedFd {
        match self {
            Connection::Plain(socket) => socket,
            Connection::Encrypted(_) | Connection::Striped(_) => unreachable!("{DATA_BY_TCP}"),
        }
    }

    /// Turns the connection into a link over its sockets. `zero_copy` allows sends without a copy.
    pub(crate) fn into_link(self, zero_copy: bool) -> Link {
        match self {
            Connection::Plain(socket) => Link::Socket(SocketLink::new(socket, zero_copy)),
            Connection::Encrypted(link) => Link::Tls(link),
            Connection::Striped(connections) => {
                // A zero-copy stripe would block its connection's next stripe until the peer has acknowledged it.
                let links = connections.into_iter().map(|connection| connection.into_link(false)).collect();
                Link::Striped(StripedLink::new(links))
            }
        }
    }
}

impl Link {
    /// Sends as much of a header and its payload as possible. Returns the number of bytes sent. The next call must start with the first
    /// unsent byte. Until then, the caller must not move or change the unsent bytes.
    ///
    /// With `may_zero_copy`, the link may delay counting bytes as sent until the peer has received them. The caller must not set it if both
    /// ranks receive only after their own bytes count as sent, because each would wait for the other.
    pub(crate) fn send(
        &mut self,
        header: &[u8],
        payload: &[u8],
        may_zero_copy: bool,
    ) -> Result<usize, Broken> {
        match self {
            Link::Socket(link) => link.send(header, payload, may_zero_copy),
            Link::Tls(link) => link.send(header, payload).map_err(|_| Broken),
            Link::Ring(link) => link.send(header, payload),
            Link::Mpi(link) => link.send(header, payload),
            Link::Striped(link) => link.send(header, payload),
        }
    }

    /// Receives as much of a header as has arrived. Returns the number of bytes.
    pub(crate) fn receive_header(&mut self, header: &mut [u8]) -> Result<usize, Broken> {
        match self {
            Link::Mpi(link) => link.receive_header(header),
            link => link.receive(header),
        }
    }

    /// Receives as much of a payload as has arrived. Returns the number of bytes. The next call must pass the rest, and no other code may
    /// use that memory until then.
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

    /// Announces that the caller is about to sleep. Returns true if the link is ready, so that the caller must not sleep.
    pub(crate) fn prepare_sleep(&mut self, interest: Interest) -> Result<bool, Broken> {
        let Link::Ring(link) = self else { return Ok(false) };
        link.prepare_sleep(interest)
    }

    /// Announces that the caller is awake again.
    pub(crate) fn end_sleep(&mut self, interest: Interest) {
        match self {
            Link::Socket(_) | Link::Tls(_) | Link::Striped(_) => {}
            Link::Ring(link) => link.end_sleep(interest),
            Link::Mpi(link) => link.end_sleep(),
        }
    }

    /// The file descriptor and the events to poll while asleep.
    pub(crate) fn poll(&self, interest: Interest) -> (BorrowedFd<'_>, PollFlags) {
        match self {
            Link::Socket(link) => link.poll(interest),
            Link::Tls(link) => link.poll(interest),
            Link::Ring(link) => link.poll(),
            Link::Mpi(link) => link.poll(),
            Link::Striped(link) => link.poll(interest),
        }
    }

    /// Maximum time to sleep, if nothing wakes the sleeper when bytes arrive.
    pub(crate) fn poll_interval(&self) -> Option<Duration> {
        matches!(self, Link::Mpi(_)).then_some(POLL_INTERVAL)
    }

    /// Whether polling for a short time costs less than sleeping.
    pub(crate) fn is_worth_polling(&self) -> bool {
        matches!(self, Link::Ring(_))
    }

    /// Whether only an attempt to send or receive shows that the link is ready.
    pub(crate) fn must_be_tried(&self) -> bool {
        matches!(self, Link::Mpi(_))
    }

    /// Ends the use of the link. Returns whether the kernel or MPI may still access memory passed to the link, which then must never be
    /// freed.
    pub(crate) fn abandon(&mut self) -> bool {
        match self {
            Link::Tls(_) | Link::Ring(_) | Link::Striped(_) => false,
            Link::Socket(link) => link.has_pending_zero_copy(),
            Link::Mpi(link) => link.abandon(),
        }
    }

    /// Whether the link is ready, as far as that is visible without a system call.
    pub(crate) fn is_ready(&self, interest: Interest) -> bool {
        matches!(self, Link::Ring(link) if link.is_ready(interest))
    }
}
