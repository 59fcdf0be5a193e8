//! The control connections: one to each peer, on which nothing travels but notices.
//!
//! A connection that ends without a goodbye is how a rank learns that a peer's process died: the kernel
//! closes a dead process's sockets at once, and keepalive (see `rendezvous`) ends those of a dead host.

use crate::engine::Call;
use crate::error::CommError;
use crate::notice::{Event, NOTICE_BYTES, Notice};
use rustix::event::{PollFd, PollFlags, Timespec, epoll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};
use trireme_base::Rank;

/// How long a wait lasts at most before it looks at the connections and the deadline again.
pub(crate) const TICK: Duration = Duration::from_millis(50);
/// After this time in one operation a rank tells the others where it is, so that all know who is missing.
const STALL: Duration = Duration::from_secs(1);
/// How long to look for the reason of a broken data connection on the control connection beside it.
const REASON_WAIT: Duration = Duration::from_secs(1);

/// The control connections of one rank.
pub(crate) struct Control {
    peers: Vec<Peer>,
    /// Readable when any connection is.
    epoll: OwnedFd,
    /// The operation that this rank last told its peers it is waiting in, plus one.
    told_waiting: u64,
}

struct Peer {
    link: Link,
    /// Operations that the peer is known to have begun.
    num_begun: u64,
}

enum Link {
    /// This rank itself.
    Own,
    Connected(Connection),
    Ended(Ending),
}

/// How a peer's part in the group ended.
#[derive(Clone, Copy)]
enum Ending {
    /// It said goodbye, or why it failed. It takes part in the operations before the notice's.
    Said(Notice),
    /// The connection ended or broke without a word.
    Lost,
    /// It sent what is no notice.
    Garbage,
}

struct Connection {
    socket: OwnedFd,
    received: [u8; NOTICE_BYTES],
    num_received: usize,
}

impl Control {
    /// Takes one connected stream socket per peer, in rank order, `None` for this rank.
    pub(crate) fn new(sockets: Vec<Option<OwnedFd>>) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let mut peers = Vec::with_capacity(sockets.len());
        for (rank, socket) in sockets.into_iter().enumerate() {
            let link = match socket {
                None => Link::Own,
                Some(socket) => {
                    let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
                    epoll::add(&epoll, &socket, epoll::EventData::new_u64(rank as u64), flags)?;
                    Link::Connected(Connection { socket, received: [0; NOTICE_BYTES], num_received: 0 })
                }
            };
            peers.push(Peer { link, num_begun: 0 });
        }
        Ok(Control { peers, epoll, told_waiting: 0 })
    }

    /// Reads what the peers said, and fails if it ends `call`.
    pub(crate) fn check(&mut self, call: &Call) -> Result<(), CommError> {
        if self.is_readable(Duration::ZERO).map_err(|source| call.wait_failed(source))? {
            let world_size = self.peers.len();
            self.peers.iter_mut().for_each(|peer| peer.read(world_size));
        }
        let failure = self.peers.iter().enumerate().find_map(|(rank, peer)| match peer.link {
            Link::Ended(ending) => self.failure_of(Rank(rank), ending, call),
            Link::Own | Link::Connected(_) => None,
        });
        failure.map_or(Ok(()), Err)
    }

    /// To be called at least every [`TICK`] while `call` waits: checks the peers and the deadline, and
    /// tells the peers where this rank is when that takes long.
    pub(crate) fn tick(&mut self, call: &Call) -> Result<(), CommError> {
        self.check(call)?;
        let elapsed = call.started.elapsed();
        if elapsed >= call.timeout {
            return Err(call.timed_out(self.missing(call)));
        }
        if elapsed >= STALL.min(call.timeout / 4) && self.told_waiting <= call.sequence {
            self.told_waiting = call.sequence + 1;
            self.tell(Notice { sequence: call.sequence, event: Event::Waiting });
        }
        Ok(())
    }

    /// Why the data connection to `rank` broke: what that rank says, or else that it is lost.
    pub(crate) fn reason_of_break(&mut self, rank: Rank, call: &Call) -> CommError {
        let deadline = Instant::now() + REASON_WAIT;
        while let Link::Connected(_) = self.peers[rank.0].link {
            if let Err(failure) = self.check(call) {
                return failure;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || self.is_readable(left).is_err() {
                break;
            }
        }
        call.peer_lost(rank)
    }

    /// Tells the peers why `call` has failed on this rank.
    pub(crate) fn announce(&mut self, call: &Call, failure: &CommError) {
        let event = match *failure {
            CommError::PeerLost { rank, .. } => Event::Lost { rank },
            CommError::PeerLeft { rank, .. } => Event::Left { rank },
            CommError::Mismatch { sequence, rank, operation, other_rank, other_operation } => {
                Event::Mismatch { sequence, first: (rank, operation), second: (other_rank, other_operation) }
            }
            CommError::TimedOut { .. } => Event::TimedOut,
            _ => Event::GaveUp,
        };
        self.tell(Notice { sequence: call.sequence, event });
    }

    /// Tells the peers that this rank leaves before operation `sequence`.
    pub(crate) fn leave(&mut self, sequence: u64) {
        self.tell(Notice { sequence, event: Event::Goodbye });
    }

    /// Best effort: a peer that cannot be told has ended, or will find the connection ended.
    fn tell(&mut self, notice: Notice) {
        let bytes = notice.encode();
        for peer in &self.peers {
            if let Link::Connected(connection) = &peer.link {
                let _ = send(&connection.socket, &bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
            }
        }
    }

    fn is_readable(&self, wait: Duration) -> io::Result<bool> {
        let mut polled = [PollFd::new(&self.epoll, PollFlags::IN)];
        let timeout = Timespec::try_from(wait).expect("waits are short");
        match rustix::event::poll(&mut polled, Some(&timeout)) {
            Ok(num_ready) => Ok(num_ready > 0),
            Err(Errno::INTR) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    /// The failure of `call` if the end of `rank` is one.
    fn failure_of(&self, rank: Rank, ending: Ending, call: &Call) -> Option<CommError> {
        let notice = match ending {
            Ending::Lost => return Some(call.peer_lost(rank)),
            Ending::Garbage => return Some(call.protocol(rank, "it sent bytes that are no notice")),
            Ending::Said(notice) if notice.sequence > call.sequence => return None,
            Ending::Said(notice) => notice,
        };
        Some(match notice.event {
            Event::Goodbye => call.peer_left(rank),
            // A peer that cannot reach this rank fails alone, as far as this rank can tell.
            Event::Lost { rank: other } | Event::Left { rank: other } if self.is_own(other) => {
                call.peer_failed(rank)
            }
            Event::Lost { rank: lost } => call.peer_lost(lost),
            Event::Left { rank: left } => call.peer_left(left),
            Event::Mismatch { sequence, first, second } => CommError::Mismatch {
                sequence,
                rank: first.0,
                operation: first.1,
                other_rank: second.0,
                other_operation: second.1,
            },
            Event::TimedOut => match self.missing(call) {
                // Then this rank is the one that was waited for.
                missing if missing.is_empty() => call.peer_failed(rank),
                missing => call.timed_out(missing),
            },
            Event::Waiting | Event::GaveUp => call.peer_failed(rank),
        })
    }

    fn is_own(&self, rank: Rank) -> bool {
        matches!(self.peers[rank.0].link, Link::Own)
    }

    /// Peers that are not known to have begun `call`.
    fn missing(&self, call: &Call) -> Vec<Rank> {
        let is_missing =
            |(rank, peer): &(usize, &Peer)| peer.num_begun <= call.sequence && !self.is_own(Rank(*rank));
        self.peers.iter().enumerate().filter(is_missing).map(|(rank, _)| Rank(rank)).collect()
    }
}

/// Becomes readable when there is something for [`check`](Control::check) to read.
impl AsFd for Control {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

impl Peer {
    /// Takes in everything that has come; the connection is closed when it has ended.
    fn read(&mut self, world_size: usize) {
        while let Link::Connected(connection) = &mut self.link {
            let ending = match connection.read(world_size) {
                Ok(None) => return,
                Ok(Some(Notice { sequence, event: Event::Waiting })) => {
                    self.num_begun = self.num_begun.max(sequence.saturating_add(1));
                    continue;
                }
                Ok(Some(notice)) => {
                    let has_begun = u64::from(notice.event != Event::Goodbye);
                    self.num_begun = self.num_begun.max(notice.sequence.saturating_add(has_begun));
                    Ending::Said(notice)
                }
                Err(ending) => ending,
            };
            self.link = Link::Ended(ending);
        }
    }
}

impl Connection {
    /// The next notice, if all of it has come.
    fn read(&mut self, world_size: usize) -> Result<Option<Notice>, Ending> {
        let rest = &mut self.received[self.num_received..];
        match recv(&self.socket, rest, RecvFlags::DONTWAIT) {
            Ok((_, 0)) => return Err(Ending::Lost),
            Ok((_, num_read)) => self.num_received += num_read,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            Err(_) => return Err(Ending::Lost),
        }
        if self.num_received < NOTICE_BYTES {
            return Ok(None);
        }
        self.num_received = 0;
        Notice::decode(&self.received, world_size).map(Some).ok_or(Ending::Garbage)
    }
}
