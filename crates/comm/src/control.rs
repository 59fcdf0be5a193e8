//! The control connections: one to each peer, which carry only notices.
//!
//! A connection that ends without a goodbye means that the peer's process died: the kernel closes the sockets of a dead process at once,
//! and keepalive (see `rendezvous`) ends the connections to a dead host.
//!
//! # Late or stuck
//! Each rank has a [heartbeat](trireme_base::Heartbeat), which records every sign of progress: a line of its program, an operation, a
//! message, bytes that move, and, by [`Group::heartbeat`](crate::Group::heartbeat), long work outside of the group. A rank that waits for
//! longer than [`stall_threshold`] asks the missing ranks for the age of their last beat. It fails if a missing rank has been silent for
//! the timeout, or if all ranks have reached the operation and none of them makes progress ([`Control::timed_out_peers`]). Messages follow
//! the same rule (`messages/message_engine.rs`).
//!
//! A waiting rank adopts the progress of the rank that it waits for, so a chain of ranks waits as long as its last rank works. The reported
//! age is subtracted from the time of the request, not of the reply, and is rounded up. So the age only grows as it is passed on, and ranks
//! that wait in a circle still time out.

mod peer;

use crate::call::{Call, CallStatistics};
use crate::error::{CommError, GroupDeadlock};
use crate::notice::{NOTICE_BYTES, Notice, NoticeKind};
use crate::recorder::{GroupRecorder, ReportedPlace};
use peer::{ControlConnection, ControlLink, Ending, Peer};
use rustix::event::{PollFd, PollFlags, Timespec, epoll};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};
use trireme_base::Rank;

/// Maximum time that a wait sleeps before it checks the connections and the deadline again.
pub(crate) const TICK: Duration = Duration::from_millis(50);
/// After this time in one operation, a rank reports to its peers where it waits, so that all know which ranks are missing and detect a
/// mismatch. It repeatedly asks missing ranks for their progress at the same interval.
const STALL: Duration = Duration::from_secs(1);
/// Upper bound of the time after which a rank warns its user that it waits.
const WARN_MAX: Duration = Duration::from_secs(30);
/// How long to wait on the control connection for the reason why a data connection broke.
pub(crate) const REASON_WAIT: Duration = Duration::from_secs(1);

pub(crate) struct Control {
    /// The cost so far of the operation in flight.
    pub(crate) call_statistics: CallStatistics,
    peers: Vec<Peer>,
    /// Readable when any connection is.
    epoll: OwnedFd,
    /// Number of the last operation in which this rank reported to its peers that it waits, plus one.
    reported_waiting: u64,
    /// Number of the operation about which this rank last warned its user, plus one.
    warned_of_stall: u64,
    /// When this rank last reported to its peers that it waits.
    reported_at: Option<Instant>,
    /// When bytes last moved in an operation, or a peer was last found to have begun one.
    last_progress: Option<Instant>,
    /// Whether a peer's failure was noticed while this rank was in no operation.
    has_seen_failure: bool,
    /// The place in this rank's last [`NoticeKind::Blocked`] notice.
    reported_blocked: Option<ReportedPlace>,
    recorder: GroupRecorder,
}

impl Control {
    /// Creates the control connections from one connected stream socket per peer, in rank order, with `None` for this rank.
    pub(crate) fn new(sockets: Vec<Option<OwnedFd>>, recorder: GroupRecorder) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let mut peers = Vec::with_capacity(sockets.len());
        for (rank, socket) in sockets.into_iter().enumerate() {
            let link = match socket {
                None => ControlLink::Own,
                Some(socket) => {
                    let flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP;
                    epoll::add(&epoll, &socket, epoll::EventData::new_u64(rank as u64), flags)?;
                    ControlLink::Connected(ControlConnection {
                        socket,
                        unsent: Vec::new(),
                        received: [0; NOTICE_BYTES],
                        num_received: 0,
                    })
                }
            };
            peers.push(Peer { link, ..Peer::default() });
        }
        Ok(Control {
            call_statistics: CallStatistics::default(),
            peers,
            epoll,
            reported_waiting: 0,
            warned_of_stall: 0,
            reported_at: None,
            last_progress: None,
            has_seen_failure: false,
            reported_blocked: None,
            recorder,
        })
    }

    /// Reads the peers' notices, and fails if they end `call`.
    pub(crate) fn check(&mut self, call: &Call) -> Result<(), CommError> {
        if self.is_readable(Duration::ZERO).map_err(|source| call.wait_failed(source))? {
            self.read();
        }
        self.send_progress_requests(call.sequence);
        let failure = self.peers.iter().enumerate().find_map(|(rank, peer)| match peer.link {
            ControlLink::Ended(ending, _) => self.failure_of(Rank(rank), ending, call),
            ControlLink::Own | ControlLink::Connected(_) => None,
        });
        failure.or_else(|| self.mismatch_failure(call)).or_else(|| self.deadlock(call)).map_or(Ok(()), Err)
    }

    /// Reads the peers' notices while this rank executes no operation and `sequence` is its next one. If a peer waits for this rank, and
    /// this rank is blocked at a known place, reports that place to the peers. Returns true once: the first time that a peer has failed or
    /// is lost.
    pub(crate) fn read_while_idle(&mut self, sequence: u64) -> bool {
        if self.is_readable(Duration::ZERO).unwrap_or(false) {
            self.read();
        }
        self.send_progress_requests(sequence);
        let is_awaited = |peer: &Peer| peer.waiting.is_some_and(|(theirs, _)| theirs >= sequence);
        if self.peers.iter().any(is_awaited)
            && let Some(place) = self.recorder.blocked_elsewhere()
            && self.reported_blocked.is_none_or(|told| told.operation_key() != place.operation_key())
        {
            self.reported_blocked = Some(place);
            self.notify(Notice { sequence, kind: NoticeKind::Blocked(place) });
        }
        let has_failure = self.peers.iter().any(|peer| match peer.link {
            ControlLink::Own | ControlLink::Connected(_) => false,
            ControlLink::Ended(Ending::Notice(notice), _) => notice.kind != NoticeKind::Goodbye,
            ControlLink::Ended(..) => true,
        });
        has_failure && !std::mem::replace(&mut self.has_seen_failure, true)
    }

    /// Waits for each peer to report its place or to end, at most for the timeout in the recorder's options.
    pub(crate) fn wait_for_places(&mut self) {
        let (started, timeout) = (Instant::now(), self.recorder.recorder.peer_reports_timeout());
        loop {
            self.read();
            let is_open =
                |peer: &Peer| matches!(peer.link, ControlLink::Connected(_)) && !peer.has_reported_place;
            let left = timeout.saturating_sub(started.elapsed());
            if left.is_zero() || !self.peers.iter().any(is_open) || self.is_readable(left.min(TICK)).is_err()
            {
                return;
            }
        }
    }

    /// Checks the peers and the deadline. Notifies the peers that this rank waits if `call` takes long. Must be called every [`TICK`].
    pub(crate) fn tick(&mut self, call: &Call) -> Result<(), CommError> {
        self.check(call)?;
        let elapsed = call.started.elapsed();
        if elapsed < stall_threshold(call.timeout) {
            return Ok(());
        }
        if let Some(silent) = self.timed_out_peers(call) {
            return Err(call.timed_out(silent));
        }
        let notice =
            Notice { sequence: call.sequence, kind: NoticeKind::Waiting { operation: call.operation } };
        if self.reported_waiting <= call.sequence {
            self.reported_waiting = call.sequence + 1;
            self.reported_at = Some(Instant::now());
            self.peers.iter_mut().for_each(|peer| peer.ask(notice));
        } else if self.reported_at.is_none_or(|last| last.elapsed() >= stall_threshold(call.timeout)) {
            self.reported_at = Some(Instant::now());
            let missing = self.missing(call);
            for (rank, peer) in self.peers.iter_mut().enumerate() {
                if peer.asked.is_none() && (missing.is_empty() || missing.contains(&Rank(rank))) {
                    peer.ask(notice);
                }
            }
        }
        if elapsed >= stall_warning_threshold(call.timeout) && self.warned_of_stall <= call.sequence {
            self.warned_of_stall = call.sequence + 1;
            self.recorder.report_stall(call, &self.missing(call));
        }
        Ok(())
    }

    pub(crate) fn record_progress(&mut self) {
        let now = Instant::now();
        self.last_progress = Some(now);
        self.recorder.recorder.heartbeat().beat_at(now);
    }

    /// Sends the progress requests that the message engine has recorded, except to peers that have not answered the last one.
    fn send_progress_requests(&mut self, sequence: u64) {
        for rank in self.recorder.take_progress_requests() {
            let peer = &mut self.peers[rank.0];
            if peer.asked.is_none() {
                peer.ask(Notice { sequence, kind: NoticeKind::ProgressRequest });
            }
        }
    }

    /// The peers that have not reached the operation and made no progress for the timeout. An empty list if all have reached it, but no
    /// byte moved and no peer made progress for the timeout. `None` if the operation has not timed out.
    fn timed_out_peers(&self, call: &Call) -> Option<Vec<Rank>> {
        let mut missing = self.missing(call);
        if missing.is_empty() {
            let since = self.last_progress.map_or(call.started, |moved| moved.max(call.started));
            let others = (0..self.peers.len()).map(Rank).filter(|&rank| !self.is_own(rank));
            let are_silent = others
                .map(|rank| self.recorder.time_since_progress(rank, since))
                .all(|silence| silence >= call.timeout);
            return (since.elapsed() >= call.timeout && are_silent).then_some(missing);
        }
        missing.retain(|&rank| self.recorder.time_since_progress(rank, call.started) >= call.timeout);
        (!missing.is_empty()).then_some(missing)
    }

    /// Determines why the data connection to `rank` broke: the reason that the rank reports, or else that it is lost.
    pub(crate) fn reason_of_break(&mut self, rank: Rank, call: &Call) -> CommError {
        self.awaited_failure(Some(rank), call).unwrap_or_else(|| call.peer_lost(rank))
    }

    /// Waits up to [`REASON_WAIT`] for a notice that ends `call`; given a `rank`, only while that rank is connected. Returns the failure,
    /// if there is one.
    pub(crate) fn awaited_failure(&mut self, rank: Option<Rank>, call: &Call) -> Option<CommError> {
        let deadline = Instant::now() + REASON_WAIT;
        loop {
            // The reason may have arrived before.
            if let Err(failure) = self.check(call) {
                return Some(failure);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let is_connected = |rank: Rank| matches!(self.peers[rank.0].link, ControlLink::Connected(_));
            if !rank.is_none_or(is_connected) || left.is_zero() || self.is_readable(left).is_err() {
                return None;
            }
        }
    }

    pub(crate) fn report_place(&mut self, sequence: u64, place: Option<ReportedPlace>) {
        self.notify(Notice { sequence, kind: NoticeKind::Place(place) });
    }

    /// Notifies the peers why operation `sequence` failed on this rank, and at which place.
    pub(crate) fn announce(&mut self, sequence: u64, failure: &CommError, place: Option<ReportedPlace>) {
        self.report_place(sequence, place);
        let event = match *failure {
            CommError::PeerLost { rank, .. } => NoticeKind::Lost { rank },
            CommError::PeerLeft { rank, .. } => NoticeKind::Left { rank },
            CommError::Mismatch { sequence, rank, operation, other_rank, other_operation } => {
                NoticeKind::Mismatch {
                    sequence,
                    first: (rank, operation),
                    second: (other_rank, other_operation),
                }
            }
            CommError::TimedOut { .. } => NoticeKind::TimedOut,
            _ => NoticeKind::Failed,
        };
        self.notify(Notice { sequence, kind: event });
    }

    /// Notifies the peers that this rank leaves before operation `sequence`.
    pub(crate) fn leave(&mut self, sequence: u64) {
        self.notify(Notice { sequence, kind: NoticeKind::Goodbye });
    }

    fn notify(&mut self, notice: Notice) {
        self.peers.iter_mut().for_each(|peer| peer.notify(notice));
    }

    fn read(&mut self) {
        let world_size = self.peers.len();
        for (rank, peer) in self.peers.iter_mut().enumerate() {
            let num_begun = peer.num_begun;
            if let Some(ending) = peer.read(Rank(rank), world_size, &self.recorder) {
                peer.end(ending, &self.epoll);
            }
            // A missing peer has begun an operation. The timeout for its data starts now.
            if peer.num_begun > num_begun {
                self.last_progress = Some(Instant::now());
            }
            if std::mem::take(&mut peer.is_asking) {
                // Rounded up, so that the peer does not take the progress for more recent than it was.
                let milliseconds = 1 + self.recorder.recorder.heartbeat().age().as_millis() as u64;
                peer.notify(Notice { sequence: 0, kind: NoticeKind::Progress { milliseconds } });
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

    /// The failure of `call`, if the peer's ending causes one.
    fn failure_of(&self, rank: Rank, ending: Ending, call: &Call) -> Option<CommError> {
        let notice = match ending {
            Ending::Lost => return Some(call.peer_lost(rank)),
            Ending::Invalid => return Some(call.protocol(rank, "it sent bytes that are not a valid notice")),
            Ending::Notice(notice) if notice.sequence > call.sequence => return None,
            Ending::Notice(notice) => notice,
        };
        Some(match notice.kind {
            NoticeKind::Goodbye => call.peer_left(rank),
            // The peer reports that this rank is lost or has left, which is not so. Only the peer counts as failed.
            NoticeKind::Lost { rank: other } | NoticeKind::Left { rank: other } if self.is_own(other) => {
                call.peer_failed(rank)
            }
            NoticeKind::Lost { rank: lost } => call.peer_lost(lost),
            NoticeKind::Left { rank: left } => call.peer_left(left),
            NoticeKind::Mismatch { sequence, first, second } => CommError::Mismatch {
                sequence,
                rank: first.0,
                operation: first.1,
                other_rank: second.0,
                other_operation: second.1,
            },
            NoticeKind::TimedOut => match self.missing(call) {
                // No rank is missing here, so the peer waited for this rank.
                missing if missing.is_empty() => call.peer_failed(rank),
                missing => call.timed_out(missing),
            },
            NoticeKind::Waiting { .. }
            | NoticeKind::Place(_)
            | NoticeKind::Blocked(_)
            | NoticeKind::ProgressRequest
            | NoticeKind::Progress { .. }
            | NoticeKind::Failed => call.peer_failed(rank),
        })
    }

    /// The mismatch, if the operation in which a peer waits differs from the one that this rank issued under the same number.
    fn mismatch_failure(&mut self, call: &Call) -> Option<CommError> {
        let own = self.own()?;
        self.peers.iter_mut().enumerate().find_map(|(rank, peer)| {
            let (sequence, theirs) = peer.waiting.take_if(|(sequence, _)| *sequence <= call.sequence)?;
            let issued =
                if sequence == call.sequence { call.operation } else { self.recorder.issued(sequence)? };
            (issued != theirs).then(|| CommError::mismatch(sequence, (own, issued), (Rank(rank), theirs)))
        })
    }

    /// The failure, if a peer waits in another group for this rank, while this rank waits for it here.
    fn deadlock(&self, call: &Call) -> Option<CommError> {
        let (other_rank, place) = self.peers.iter().enumerate().find_map(|(rank, peer)| {
            let place = peer.blocked.filter(|_| peer.num_begun <= call.sequence)?;
            self.recorder.is_deadlocked_with(Rank(rank), &place).then_some((Rank(rank), place))
        })?;
        Some(CommError::GroupDeadlock(Box::new(GroupDeadlock {
            rank: self.own()?,
            group: self.recorder.name().to_owned(),
            sequence: call.sequence,
            operation: call.operation,
            other_rank,
            other_group: place.group.as_str().to_owned(),
            other_sequence: place.sequence,
            other_operation: place.operation,
        })))
    }

    fn own(&self) -> Option<Rank> {
        self.peers.iter().position(|peer| matches!(peer.link, ControlLink::Own)).map(Rank)
    }

    fn is_own(&self, rank: Rank) -> bool {
        matches!(self.peers[rank.0].link, ControlLink::Own)
    }

    fn missing(&self, call: &Call) -> Vec<Rank> {
        let is_missing =
            |(rank, peer): &(usize, &Peer)| peer.num_begun <= call.sequence && !self.is_own(Rank(*rank));
        self.peers.iter().enumerate().filter(is_missing).map(|(rank, _)| Rank(rank)).collect()
    }
}

/// How long an operation with this timeout runs before this rank reports to its peers that it waits.
pub(crate) fn stall_threshold(timeout: Duration) -> Duration {
    STALL.min(timeout / 4)
}

/// How long an operation with this timeout runs before the user is warned.
pub(crate) fn stall_warning_threshold(timeout: Duration) -> Duration {
    WARN_MAX.min(timeout / 2)
}

/// Becomes readable when [`check`](Control::check) has something to read.
impl AsFd for Control {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}
