//! The control connections: one to each peer, on which nothing travels but notices.
//!
//! A connection that ends without a goodbye is how a rank learns that a peer's process died: the kernel
//! closes a dead process's sockets at once, and keepalive (see `rendezvous`) ends those of a dead host.

use crate::engine::Call;
use crate::error::CommError;
use crate::notice::{NOTICE_BYTES, Notice};
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
    /// The last operation this rank told its peers it is stalled in, plus one.
    told_reached: u64,
}

enum Peer {
    /// This rank itself.
    Own,
    Connected(Connection),
    /// Said goodbye before the operation of this number.
    Left {
        sequence: u64,
    },
}

struct Connection {
    socket: OwnedFd,
    received: [u8; NOTICE_BYTES],
    num_received: usize,
    /// The latest operation the peer said it is in, plus one.
    reached: u64,
}

/// What a read brought.
enum Received {
    Notice(Notice),
    Garbage,
    /// The connection ended or broke.
    Ended,
    /// No whole notice yet.
    Nothing,
}

impl Control {
    /// Takes one connected stream socket per peer, in rank order, `None` for this rank.
    pub(crate) fn new(sockets: Vec<Option<OwnedFd>>) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let mut peers = Vec::with_capacity(sockets.len());
        for (rank, socket) in sockets.into_iter().enumerate() {
            peers.push(match socket {
                None => Peer::Own,
                Some(socket) => {
                    let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
                    epoll::add(&epoll, &socket, epoll::EventData::new_u64(rank as u64), flags)?;
                    Peer::Connected(Connection {
                        socket,
                        received: [0; NOTICE_BYTES],
                        num_received: 0,
                        reached: 0,
                    })
                }
            });
        }
        Ok(Control { peers, epoll, told_reached: 0 })
    }

    /// Fails if a peer has already left, or anything in [`check`](Control::check) does.
    pub(crate) fn begin(&mut self, call: &Call) -> Result<(), CommError> {
        for (rank, peer) in self.peers.iter().enumerate() {
            if let Peer::Left { sequence } = *peer
                && sequence <= call.sequence
            {
                return Err(call.peer_left(Rank(rank)));
            }
        }
        self.check(call)
    }

    /// Reads what the peers said, if anything, and fails if it ends `call`.
    pub(crate) fn check(&mut self, call: &Call) -> Result<(), CommError> {
        if !self.is_readable(Duration::ZERO).map_err(|source| call.wait_failed(source))? {
            return Ok(());
        }
        let mut failure = None;
        for rank in 0..self.peers.len() {
            match self.read_peer(rank, call) {
                Ok(()) => {}
                // A loss is the cause of what other peers report because of it.
                Err(loss @ CommError::PeerLost { .. }) => return Err(loss),
                Err(other) => failure = failure.or(Some(other)),
            }
        }
        failure.map_or(Ok(()), Err)
    }

    /// To be called at least every [`TICK`] while `call` waits: checks the peers and the deadline, and
    /// tells the peers where this rank is when that takes long.
    pub(crate) fn tick(&mut self, call: &Call) -> Result<(), CommError> {
        self.check(call)?;
        let elapsed = call.started.elapsed();
        if elapsed >= call.timeout {
            return Err(self.timed_out(call));
        }
        if elapsed >= STALL.min(call.timeout / 4) && self.told_reached <= call.sequence {
            self.told_reached = call.sequence + 1;
            self.tell(Notice::Reached { sequence: call.sequence });
        }
        Ok(())
    }

    /// Why the data connection to `rank` broke: what that rank says, or else that it is lost.
    pub(crate) fn reason_of_break(&mut self, rank: Rank, call: &Call) -> CommError {
        let deadline = Instant::now() + REASON_WAIT;
        while let Peer::Connected(_) = self.peers[rank.0] {
            if let Err(failure) = self.check(call) {
                return failure;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || self.is_readable(left).is_err() {
                return call.peer_lost(rank);
            }
        }
        call.peer_left(rank)
    }

    /// Tells the peers why this rank's group has failed.
    pub(crate) fn announce(&mut self, failure: &CommError) {
        self.tell(match *failure {
            CommError::PeerLost { rank, .. } => Notice::Lost { rank },
            CommError::Mismatch { sequence, rank, operation, other_rank, other_operation } => {
                Notice::Mismatch { sequence, first: (rank, operation), second: (other_rank, other_operation) }
            }
            CommError::TimedOut { sequence, .. } => Notice::TimedOut { sequence },
            _ => Notice::GaveUp,
        });
    }

    /// Tells the peers that this rank leaves before operation `sequence`.
    pub(crate) fn leave(&mut self, sequence: u64) {
        self.tell(Notice::Goodbye { sequence });
    }

    /// Best effort: a peer that cannot be told has ended, or will find the connection ended.
    fn tell(&mut self, notice: Notice) {
        let bytes = notice.encode();
        for peer in &self.peers {
            if let Peer::Connected(connection) = peer {
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

    fn read_peer(&mut self, rank: usize, call: &Call) -> Result<(), CommError> {
        let world_size = self.peers.len();
        while let Peer::Connected(connection) = &mut self.peers[rank] {
            let notice = match connection.read(world_size) {
                Received::Nothing => break,
                Received::Ended => return Err(call.peer_lost(Rank(rank))),
                Received::Garbage => return Err(call.protocol(Rank(rank), "sent bytes that are no notice")),
                Received::Notice(notice) => notice,
            };
            match notice {
                Notice::Reached { sequence } => connection.reached = sequence.saturating_add(1),
                Notice::Goodbye { sequence } => {
                    self.peers[rank] = Peer::Left { sequence };
                    if sequence <= call.sequence {
                        return Err(call.peer_left(Rank(rank)));
                    }
                }
                Notice::Lost { rank: lost } => return Err(self.lost_according_to(Rank(rank), lost, call)),
                Notice::Mismatch { sequence, first, second } => {
                    return Err(CommError::Mismatch {
                        sequence,
                        rank: first.0,
                        operation: first.1,
                        other_rank: second.0,
                        other_operation: second.1,
                    });
                }
                Notice::TimedOut { sequence } => return Err(self.timed_out_at(Rank(rank), sequence, call)),
                Notice::GaveUp => return Err(call.peer_failed(Rank(rank))),
            }
        }
        Ok(())
    }

    /// A peer that lost this rank has a broken connection: it is the one that fails.
    fn lost_according_to(&self, teller: Rank, lost: Rank, call: &Call) -> CommError {
        match self.peers[lost.0] {
            Peer::Own => call.peer_failed(teller),
            _ => call.peer_lost(lost),
        }
    }

    /// A peer ran out of time: so does this rank, unless it is the one that was waited for.
    fn timed_out_at(&self, teller: Rank, sequence: u64, call: &Call) -> CommError {
        let missing = self.missing(call);
        if sequence != call.sequence || missing.iter().all(|&rank| rank == teller) {
            return call.peer_failed(teller);
        }
        call.timed_out(missing.into_iter().filter(|&rank| rank != teller).collect())
    }

    fn timed_out(&self, call: &Call) -> CommError {
        call.timed_out(self.missing(call))
    }

    /// Peers that have not said that they are in `call`.
    fn missing(&self, call: &Call) -> Vec<Rank> {
        let has_come = |peer: &Peer| match peer {
            Peer::Own => true,
            Peer::Connected(connection) => connection.reached > call.sequence,
            Peer::Left { sequence } => *sequence > call.sequence,
        };
        let missing = self.peers.iter().enumerate().filter(|(_, peer)| !has_come(peer));
        missing.map(|(rank, _)| Rank(rank)).collect()
    }
}

/// Becomes readable when there is something for [`check`](Control::check) to read.
impl AsFd for Control {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

impl Connection {
    fn read(&mut self, world_size: usize) -> Received {
        let rest = &mut self.received[self.num_received..];
        match recv(&self.socket, rest, RecvFlags::DONTWAIT) {
            Ok((_, 0)) => Received::Ended,
            Ok((_, num_read)) => {
                self.num_received += num_read;
                if self.num_received < NOTICE_BYTES {
                    return Received::Nothing;
                }
                self.num_received = 0;
                Notice::decode(&self.received, world_size).map_or(Received::Garbage, Received::Notice)
            }
            Err(Errno::AGAIN | Errno::INTR) => Received::Nothing,
            Err(_) => Received::Ended,
        }
    }
}
