//! The control connection to one peer, and the known state of that peer.

use crate::Operation;
use crate::notice::{NOTICE_BYTES, Notice, NoticeKind};
use crate::recorder::{GroupRecorder, ReportedPlace};
use rustix::event::epoll;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, recv, send};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};
use trireme_base::Rank;

/// Maximum bytes of notices queued for a peer that does not read.
const UNSENT_BYTES_MAX: usize = 64 << 10;

#[derive(Default)]
pub(super) struct Peer {
    pub(super) link: ControlLink,
    /// Number of operations that the peer is known to have begun.
    pub(super) num_begun: u64,
    /// The operation in which the peer reported that it waits, with its number. Taken when it is compared with this rank's operation of
    /// that number.
    pub(super) waiting: Option<(u64, Operation)>,
    /// Whether the peer waits for a report of this rank's progress.
    pub(super) is_asking: bool,
    /// When the peer was asked for its progress, if it has not answered.
    pub(super) asked: Option<Instant>,
    /// Whether the peer has reported its place after a failure.
    pub(super) has_reported_place: bool,
    /// The place where the peer reported that it is blocked.
    pub(super) blocked: Option<ReportedPlace>,
}

#[derive(Default)]
pub(super) enum ControlLink {
    #[default]
    Own,
    Connected(ControlConnection),
    /// Holds the socket if the peer may still read from it.
    Ended(Ending, Option<OwnedFd>),
}

/// How a peer's part in the group ended.
#[derive(Clone, Copy)]
pub(super) enum Ending {
    /// The peer said goodbye, or why it failed. It takes part in all operations before the notice's `sequence`.
    Notice(Notice),
    /// The connection ended or broke without a notice.
    Lost,
    /// The peer sent bytes that are not a valid notice.
    Invalid,
}

pub(super) struct ControlConnection {
    pub(super) socket: OwnedFd,
    /// Bytes that the socket has not accepted yet.
    pub(super) unsent: Vec<u8>,
    pub(super) received: [u8; NOTICE_BYTES],
    pub(super) num_received: usize,
}

impl Peer {
    /// Processes all notices that have arrived. Returns how the connection ended, if it just did.
    pub(super) fn read(&mut self, rank: Rank, world_size: usize, recorder: &GroupRecorder) -> Option<Ending> {
        let ControlLink::Connected(connection) = &mut self.link else { return None };
        loop {
            match connection.read(world_size)? {
                Ok(Notice { sequence, kind: NoticeKind::Waiting { operation } }) => {
                    self.num_begun = self.num_begun.max(sequence.saturating_add(1));
                    self.waiting = Some((sequence, operation));
                    self.is_asking = true;
                }
                Ok(Notice { kind: NoticeKind::ProgressRequest, .. }) => self.is_asking = true,
                Ok(Notice { kind: NoticeKind::Progress { milliseconds }, .. }) => {
                    // The age counts back from the request, not from the reply: otherwise, ranks that wait for each other in a cycle would
                    // report ever smaller ages.
                    let asked = self.asked.take();
                    let at = asked.and_then(|asked| asked.checked_sub(Duration::from_millis(milliseconds)));
                    at.into_iter().for_each(|at| recorder.record_progress(rank, at));
                }
                Ok(Notice { kind: NoticeKind::Place(place), .. }) => {
                    self.has_reported_place = true;
                    recorder.record_place(rank, place);
                }
                Ok(Notice { kind: NoticeKind::Blocked(place), .. }) => self.blocked = Some(place),
                Ok(notice) => {
                    let has_begun = u64::from(notice.kind != NoticeKind::Goodbye);
                    self.num_begun = self.num_begun.max(notice.sequence.saturating_add(has_begun));
                    return Some(Ending::Notice(notice));
                }
                Err(ending) => return Some(ending),
            }
        }
    }

    /// Sends a notice, best effort: a peer that cannot receive it has ended, or will notice that the connection ended.
    pub(super) fn notify(&mut self, notice: Notice) {
        match &mut self.link {
            ControlLink::Own | ControlLink::Ended(_, None) => {}
            ControlLink::Connected(connection) => connection.send(&notice.encode()),
            ControlLink::Ended(_, Some(socket)) => {
                let _ = send(socket, &notice.encode(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
            }
        }
    }

    /// Sends a notice that asks the peer for its progress.
    pub(super) fn ask(&mut self, notice: Notice) {
        self.asked = Some(Instant::now());
        self.notify(notice);
    }

    /// Stops reading from the peer. A peer that failed can still be sent this rank's place.
    pub(super) fn end(&mut self, ending: Ending, epoll: &OwnedFd) {
        let ControlLink::Connected(ControlConnection { socket, .. }) = std::mem::take(&mut self.link) else {
            unreachable!("only who is connected can end")
        };
        // Fails only if the socket is not registered.
        let _ = epoll::delete(epoll, &socket);
        let may_read = matches!(ending, Ending::Notice(notice) if notice.kind != NoticeKind::Goodbye);
        self.link = ControlLink::Ended(ending, may_read.then_some(socket));
    }
}

impl ControlConnection {
    /// Sends as much of a notice as the socket accepts. The rest is sent before the next one. Drops the notice if too many bytes are
    /// queued.
    pub(super) fn send(&mut self, notice: &[u8]) {
        if self.unsent.len() < UNSENT_BYTES_MAX {
            self.unsent.extend(notice);
        }
        while !self.unsent.is_empty() {
            match send(&self.socket, &self.unsent, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(num_sent) => drop(self.unsent.drain(..num_sent)),
                Err(Errno::INTR) => {}
                // The peer has ended, or will notice that the connection ended.
                Err(_) => return,
            }
        }
    }

    /// Returns the next notice if all of it has arrived, or how the connection ended.
    pub(super) fn read(&mut self, world_size: usize) -> Option<Result<Notice, Ending>> {
        let rest = &mut self.received[self.num_received..];
        match recv(&self.socket, rest, RecvFlags::DONTWAIT) {
            Ok((_, 0)) => return Some(Err(Ending::Lost)),
            Ok((_, num_read)) => self.num_received += num_read,
            Err(Errno::AGAIN | Errno::INTR) => return None,
            Err(_) => return Some(Err(Ending::Lost)),
        }
        if self.num_received < NOTICE_BYTES {
            return None;
        }
        self.num_received = 0;
        Some(Notice::decode(&self.received, world_size).ok_or(Ending::Invalid))
    }
}
