//! Accepts connections and runs their handshakes concurrently. Only peers that prove knowledge of the job's key are admitted.

use super::handshake::{AuthenticatedPeer, HandshakeAcceptor, HandshakeStep, Introduction};
use super::key::{Key, nonce};
use super::message::Message;
use super::refusals::Refusals;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, ioctl_fionbio};
use rustix::net::{RecvFlags, SendFlags, SocketFlags, acceptfrom_with, recv, send};
use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// Time after which a connection that has not authenticated is closed.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of unauthenticated connections. Lowered if the process runs out of file descriptors.
const NUM_HANDSHAKES_MAX: usize = 256;
/// Minimum age at which the oldest unauthenticated connection is closed to make room for a new one.
const EVICTION_AGE_MIN: Duration = Duration::from_millis(200);

/// A listening socket, and the connections whose handshakes are in progress.
pub(super) struct Acceptor<'a, I> {
    listener: BorrowedFd<'a>,
    key: &'a Key,
    refusals: &'a Refusals,
    num_handshakes_max: usize,
    /// Unauthenticated connections, the oldest first.
    pending_handshakes: VecDeque<PendingHandshake<I>>,
    /// Peers that have authenticated and are not admitted yet.
    authenticated: VecDeque<(PeerConnection, AuthenticatedPeer<I>)>,
}

/// A peer that was admitted.
pub(super) struct AcceptedPeer<I> {
    pub(super) socket: OwnedFd,
    pub(super) introduction: I,
    /// The key of this connection only.
    pub(super) key: Key,
}

/// An accepted connection, with the address of its peer if that is an IP address.
struct PeerConnection {
    socket: OwnedFd,
    address: Option<SocketAddr>,
}

/// A connection whose handshake is in progress.
struct PendingHandshake<I> {
    connection: PeerConnection,
    handshake: HandshakeAcceptor<I>,
    /// Received bytes of the current handshake message.
    received: Vec<u8>,
    since: Instant,
}

enum HandshakeProgress<I> {
    /// The handshake message is incomplete, or another one follows.
    InProgress,
    Authenticated(AuthenticatedPeer<I>),
    Refused(String),
}

impl<'a, I: Introduction> Acceptor<'a, I> {
    /// Creates the acceptor. Makes the listening socket non-blocking.
    pub(super) fn new(listener: &'a impl AsFd, key: &'a Key, refusals: &'a Refusals) -> io::Result<Self> {
        ioctl_fionbio(listener, true)?;
        let (pending_handshakes, members) = (VecDeque::new(), VecDeque::new());
        let num_handshakes_max = NUM_HANDSHAKES_MAX;
        Ok(Acceptor {
            listener: listener.as_fd(),
            key,
            refusals,
            num_handshakes_max,
            pending_handshakes,
            authenticated: members,
        })
    }

    /// Returns the next authenticated peer for which `objection` returns no reason to refuse it, or `None` at the deadline.
    pub(super) fn next(
        &mut self,
        deadline: Instant,
        mut objection: impl FnMut(&I) -> Option<String>,
    ) -> io::Result<Option<AcceptedPeer<I>>> {
        loop {
            while let Some((connection, member)) = self.authenticated.pop_front() {
                if let Some(reason) = objection(&member.introduction) {
                    self.refuse(connection, &reason);
                } else if !connection.send(&Message::Welcome(member.welcome)) {
                    self.refuse(connection, "it is not listening");
                } else {
                    let AuthenticatedPeer { introduction, key, .. } = member;
                    return Ok(Some(AcceptedPeer { socket: connection.socket, introduction, key }));
                }
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
            self.sleep(deadline)?;
            self.continue_handshakes();
            self.accept_pending()?;
        }
    }

    /// Waits until bytes or a new connection arrive, or a handshake times out.
    fn sleep(&self, deadline: Instant) -> io::Result<()> {
        let has_room = self.has_room();
        let oldest = self.pending_handshakes.front().map(|oldest| oldest.since);
        let until = [
            oldest.map(|since| since + HANDSHAKE_TIMEOUT),
            oldest.filter(|_| !has_room).map(|since| since + EVICTION_AGE_MIN),
        ];
        let until = until.into_iter().flatten().fold(deadline, Instant::min);
        let left = until.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
        let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
        let sockets = self.pending_handshakes.iter().map(|pending| pending.connection.socket.as_fd());
        let watched = has_room.then_some(self.listener).into_iter().chain(sockets);
        let mut polled: Vec<_> =
            watched.map(|socket| PollFd::from_borrowed_fd(socket, PollFlags::IN)).collect();
        match poll(&mut polled, Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether another connection can be accepted: there is a free slot, or the oldest unauthenticated connection may be evicted.
    fn has_room(&self) -> bool {
        self.pending_handshakes.len() < self.num_handshakes_max
            || self.pending_handshakes.front().is_some_and(PendingHandshake::may_be_evicted)
    }

    /// Closes the oldest unauthenticated connection without a message. If it is a member's, the member tries again.
    fn evict_oldest(&mut self) {
        if let Some(oldest) = self.pending_handshakes.pop_front() {
            self.refusals
                .add(oldest.connection.address, "it had not introduced itself when others connected");
        }
    }

    /// Accepts pending connections as long as there is room.
    fn accept_pending(&mut self) -> io::Result<()> {
        while self.has_room() {
            match acceptfrom_with(self.listener, SocketFlags::CLOEXEC) {
                Ok((socket, address)) => {
                    let address = address.and_then(|address| SocketAddr::try_from(address).ok());
                    if self.pending_handshakes.len() >= self.num_handshakes_max {
                        self.evict_oldest();
                    }
                    self.num_handshakes_max = (self.num_handshakes_max + 1).min(NUM_HANDSHAKES_MAX);
                    let handshake = HandshakeAcceptor::new(self.key.clone(), nonce()?);
                    let (connection, received, since) =
                        (PeerConnection { socket, address }, Vec::new(), Instant::now());
                    self.pending_handshakes.push_back(PendingHandshake {
                        connection,
                        handshake,
                        received,
                        since,
                    });
                }
                Err(Errno::AGAIN) => break,
                // Errors of the connection that was about to be accepted (accept(2), "Error handling").
                Err(
                    Errno::INTR
                    | Errno::CONNABORTED
                    | Errno::PROTO
                    | Errno::NOPROTOOPT
                    | Errno::OPNOTSUPP
                    | Errno::NETDOWN
                    | Errno::NETUNREACH
                    | Errno::HOSTDOWN
                    | Errno::HOSTUNREACH
                    | Errno::NONET,
                ) => {}
                // Unauthenticated connections hold the descriptors or memory that ran out, so one of them is closed. Without any, waiting
                // would not help.
                Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)
                    if !self.pending_handshakes.is_empty() =>
                {
                    self.num_handshakes_max = self.pending_handshakes.len();
                    if self.has_room() {
                        self.evict_oldest();
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Continues all handshakes. When a handshake has finished, its peer is authenticated or refused.
    fn continue_handshakes(&mut self) {
        for mut pending in std::mem::take(&mut self.pending_handshakes) {
            match pending.continue_handshake() {
                HandshakeProgress::InProgress => self.pending_handshakes.push_back(pending),
                HandshakeProgress::Authenticated(member) => {
                    self.authenticated.push_back((pending.connection, member))
                }
                HandshakeProgress::Refused(reason) => self.refuse(pending.connection, &reason),
            }
        }
    }

    fn refuse(&self, connection: PeerConnection, reason: &str) {
        // Best effort: the refused peer may not be receiving.
        connection.send(&Message::Refused(reason.to_owned()));
        self.refusals.add(connection.address, reason);
    }
}

impl<I: Introduction> PendingHandshake<I> {
    fn may_be_evicted(&self) -> bool {
        self.since.elapsed() >= EVICTION_AGE_MIN
    }

    fn continue_handshake(&mut self) -> HandshakeProgress<I> {
        let start = self.received.len();
        self.received.resize(self.handshake.message_bytes(), 0);
        let received = recv(&self.connection.socket, &mut self.received[start..], RecvFlags::DONTWAIT);
        self.received.truncate(start + received.map_or(0, |(_, num_read)| num_read));
        match received {
            Ok((_, 0)) => {
                return HandshakeProgress::Refused("it hung up before introducing itself".to_owned());
            }
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => return HandshakeProgress::Refused(format!("its connection broke: {error}")),
        }
        if let Err(reason) = self.handshake.check_prefix(&self.received) {
            return HandshakeProgress::Refused(reason.to_owned());
        }
        if self.received.len() == self.handshake.message_bytes() {
            let message = std::mem::take(&mut self.received);
            return match self.handshake.handle(&message) {
                HandshakeStep::Answer(answer) if self.connection.send(&answer) => {
                    HandshakeProgress::InProgress
                }
                HandshakeStep::Answer(_) => HandshakeProgress::Refused("it is not listening".to_owned()),
                HandshakeStep::Authenticated(member) => HandshakeProgress::Authenticated(member),
                HandshakeStep::Refused(reason) => HandshakeProgress::Refused(reason.to_owned()),
            };
        }
        if self.since.elapsed() > HANDSHAKE_TIMEOUT {
            return HandshakeProgress::Refused("it did not introduce itself in time".to_owned());
        }
        HandshakeProgress::InProgress
    }
}

impl PeerConnection {
    /// Sends a short message. Returns whether the socket accepted it at once.
    fn send(&self, message: &Message) -> bool {
        let bytes = message.encode();
        let sent = send(&self.socket, &bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        sent.is_ok_and(|num_sent| num_sent == bytes.len())
    }
}
