//! Accepts connections and runs their handshakes concurrently. Only peers that prove knowledge of the job's key are admitted.

use super::handshake::{Examination, Finding, Introduction, Member};
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
const PATIENCE: Duration = Duration::from_secs(5);
/// Maximum number of unauthenticated connections. Lowered if the process runs out of file descriptors.
const NUM_VISITORS_MAX: usize = 256;
/// At the maximum, the oldest unauthenticated connection is closed for a new one, but not before this time.
const STAY_MIN: Duration = Duration::from_millis(200);

/// A listening socket, and the connections whose handshakes are in progress.
pub(super) struct Doorway<'a, I> {
    listener: BorrowedFd<'a>,
    key: &'a Key,
    refusals: &'a Refusals,
    num_visitors_max: usize,
    /// Unauthenticated connections, the oldest first.
    visitors: VecDeque<Visitor<I>>,
    /// Peers that have authenticated and are not admitted yet.
    members: VecDeque<(Door, Member<I>)>,
}

/// A peer that was admitted.
pub(super) struct Guest<I> {
    pub(super) socket: OwnedFd,
    pub(super) introduction: I,
    /// The key of this connection only.
    pub(super) key: Key,
}

/// A connection that may be refused.
struct Door {
    socket: OwnedFd,
    address: Option<SocketAddr>,
}

/// A connection whose handshake is in progress.
struct Visitor<I> {
    door: Door,
    examination: Examination<I>,
    /// Received bytes of the current handshake message.
    received: Vec<u8>,
    since: Instant,
}

enum Heard<I> {
    /// The handshake message is incomplete, or another one follows.
    Listening,
    Member(Member<I>),
    Refused(String),
}

impl<'a, I: Introduction> Doorway<'a, I> {
    /// Creates the acceptor. Makes the listening socket non-blocking.
    pub(super) fn new(listener: &'a impl AsFd, key: &'a Key, refusals: &'a Refusals) -> io::Result<Self> {
        ioctl_fionbio(listener, true)?;
        let (visitors, members) = (VecDeque::new(), VecDeque::new());
        let num_visitors_max = NUM_VISITORS_MAX;
        Ok(Doorway { listener: listener.as_fd(), key, refusals, num_visitors_max, visitors, members })
    }

    /// Returns the next authenticated peer without an `objection`, or `None` at the deadline.
    pub(super) fn next(
        &mut self,
        deadline: Instant,
        mut objection: impl FnMut(&I) -> Option<String>,
    ) -> io::Result<Option<Guest<I>>> {
        loop {
            while let Some((door, member)) = self.members.pop_front() {
                if let Some(reason) = objection(&member.introduction) {
                    self.turn_away(door, &reason);
                } else if !door.say(&Message::Welcome(member.welcome)) {
                    self.turn_away(door, "it is not listening");
                } else {
                    let Member { introduction, key, .. } = member;
                    return Ok(Some(Guest { socket: door.socket, introduction, key }));
                }
            }
            if Instant::now() >= deadline {
                return Ok(None);
            }
            self.sleep(deadline)?;
            self.hear();
            self.admit()?;
        }
    }

    /// Waits until bytes or a new connection arrive, or a handshake times out.
    fn sleep(&self, deadline: Instant) -> io::Result<()> {
        let has_room = self.has_room();
        let oldest = self.visitors.front().map(|oldest| oldest.since);
        let until = [
            oldest.map(|since| since + PATIENCE),
            oldest.filter(|_| !has_room).map(|since| since + STAY_MIN),
        ];
        let until = until.into_iter().flatten().fold(deadline, Instant::min);
        let left = until.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
        let timeout = Timespec::try_from(left).map_err(io::Error::other)?;
        let sockets = self.visitors.iter().map(|visitor| visitor.door.socket.as_fd());
        let watched = has_room.then_some(self.listener).into_iter().chain(sockets);
        let mut polled: Vec<_> =
            watched.map(|socket| PollFd::from_borrowed_fd(socket, PollFlags::IN)).collect();
        match poll(&mut polled, Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether there is room for another connection, possibly that of the oldest one.
    fn has_room(&self) -> bool {
        self.visitors.len() < self.num_visitors_max || self.visitors.front().is_some_and(Visitor::may_leave)
    }

    /// Closes the oldest unauthenticated connection without a message. If it is a member's, the member tries again.
    fn make_room(&mut self) {
        if let Some(oldest) = self.visitors.pop_front() {
            self.refusals.add(oldest.door.address, "it had not introduced itself when others connected");
        }
    }

    /// Accepts pending connections as long as there is room.
    fn admit(&mut self) -> io::Result<()> {
        while self.has_room() {
            match acceptfrom_with(self.listener, SocketFlags::CLOEXEC) {
                Ok((socket, address)) => {
                    let address = address.and_then(|address| SocketAddr::try_from(address).ok());
                    if self.visitors.len() >= self.num_visitors_max {
                        self.make_room();
                    }
                    self.num_visitors_max = (self.num_visitors_max + 1).min(NUM_VISITORS_MAX);
                    let examination = Examination::new(self.key.clone(), nonce()?);
                    let (door, received, since) = (Door { socket, address }, Vec::new(), Instant::now());
                    self.visitors.push_back(Visitor { door, examination, received, since });
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
                    if !self.visitors.is_empty() =>
                {
                    self.num_visitors_max = self.visitors.len();
                    if self.has_room() {
                        self.make_room();
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Continues all handshakes. Finished ones are authenticated or refused.
    fn hear(&mut self) {
        for mut visitor in std::mem::take(&mut self.visitors) {
            match visitor.listen() {
                Heard::Listening => self.visitors.push_back(visitor),
                Heard::Member(member) => self.members.push_back((visitor.door, member)),
                Heard::Refused(reason) => self.turn_away(visitor.door, &reason),
            }
        }
    }

    fn turn_away(&self, door: Door, reason: &str) {
        // Best effort: the refused peer may not be receiving.
        door.say(&Message::TurnedAway(reason.to_owned()));
        self.refusals.add(door.address, reason);
    }
}

impl<I: Introduction> Visitor<I> {
    fn may_leave(&self) -> bool {
        self.since.elapsed() >= STAY_MIN
    }

    fn listen(&mut self) -> Heard<I> {
        let start = self.received.len();
        self.received.resize(self.examination.turn_bytes(), 0);
        let received = recv(&self.door.socket, &mut self.received[start..], RecvFlags::DONTWAIT);
        self.received.truncate(start + received.map_or(0, |(_, num_read)| num_read));
        match received {
            Ok((_, 0)) => return Heard::Refused("it hung up before introducing itself".to_owned()),
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
            Err(error) => return Heard::Refused(format!("its connection broke: {error}")),
        }
        if let Err(reason) = self.examination.can_begin(&self.received) {
            return Heard::Refused(reason.to_owned());
        }
        if self.received.len() == self.examination.turn_bytes() {
            let turn = std::mem::take(&mut self.received);
            return match self.examination.hear(&turn) {
                Finding::Answer(answer) if self.door.say(&answer) => Heard::Listening,
                Finding::Answer(_) => Heard::Refused("it is not listening".to_owned()),
                Finding::Member(member) => Heard::Member(member),
                Finding::Refused(reason) => Heard::Refused(reason.to_owned()),
            };
        }
        if self.since.elapsed() > PATIENCE {
            return Heard::Refused("it did not introduce itself in time".to_owned());
        }
        Heard::Listening
    }
}

impl Door {
    /// Sends a short message. Returns whether the socket accepted it at once.
    fn say(&self, message: &Message) -> bool {
        let bytes = message.encode();
        let sent = send(&self.socket, &bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        sent.is_ok_and(|num_sent| num_sent == bytes.len())
    }
}
