use crate::backoff::Backoff;
use crate::buffer::{CacheLine, Storage};
use crate::call::Call;
use crate::control::{TICK, stall_threshold, stall_warning_threshold};
use crate::recorder::{Direction, GroupRecorder};
use crate::transport::link::{Interest, Link};
use crate::transport::link_transport::{Incoming, Memories, Outgoing, ReceiveError};
use crate::{CommError, GroupOptions, Operation};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};
use trireme_base::Rank;
use trireme_schedule::collective::{ReceiveAction, Span};

/// Number of messages for which memory is preallocated. The number of pending messages depends on timing, so memory use could otherwise
/// grow in any later step.
pub(super) const NUM_PREALLOCATED: usize = 256;

/// A message that was issued and has not completed.
pub(super) struct PendingMessage {
    pub(super) slot: usize,
    peer: Rank,
    direction: Direction,
    operation: Operation,
    storage: Storage,
    /// When the message was issued, or a device released its memory.
    issued: Instant,
    number: u64,
    /// When bytes of the message last moved.
    moved: Option<Instant>,
    /// When the peer was last asked for its progress.
    asked: Option<Instant>,
    has_warned: bool,
}

impl PendingMessage {
    pub(super) fn new(
        slot: usize,
        direction: Direction,
        peer: Rank,
        operation: Operation,
        storage: Storage,
        issued: Instant,
        number: u64,
    ) -> Self {
        let (moved, asked, has_warned) = (None, None, false);
        PendingMessage { slot, peer, direction, operation, storage, issued, number, moved, asked, has_warned }
    }

    /// Whether no device uses the memory any more, so that the message may move.
    fn is_movable(&self) -> bool {
        self.storage.event().is_done()
    }
}

/// Moves messages between this rank and its peers: in order of issue per peer and direction, otherwise independently.
pub(super) struct MessageEngine {
    own: Rank,
    links: Vec<Option<Link>>,
    peer_queues: Vec<PeerQueues>,
    timeout: Duration,
    checksums: bool,
    deadlines_checked_at: Instant,
    receive_buffer: Vec<CacheLine>,
    backoff: Backoff,
    /// Memory for the list of polled files.
    polled: Vec<PollFd<'static>>,
    /// Completed messages: slot and memory.
    pub(super) ended: Vec<(usize, Storage)>,
    /// The number of the failed message, if one has failed.
    pub(super) failed: Option<u64>,
    recorder: GroupRecorder,
}

#[derive(Default)]
struct PeerQueues {
    outgoing: DirectionQueue<Outgoing>,
    incoming: DirectionQueue<Incoming>,
}

struct DirectionQueue<T> {
    waiting: VecDeque<PendingMessage>,
    /// The first message of `waiting`, once it is in flight.
    moving: Option<(Call, T)>,
    num_completed: u64,
}

impl<T> Default for DirectionQueue<T> {
    fn default() -> Self {
        DirectionQueue { waiting: VecDeque::new(), moving: None, num_completed: 0 }
    }
}

impl MessageEngine {
    pub(super) fn new(
        own: Rank,
        links: Vec<Option<Link>>,
        options: &GroupOptions,
        recorder: GroupRecorder,
    ) -> Result<Self, CommError> {
        Ok(MessageEngine {
            own,
            polled: Vec::with_capacity(1 + 2 * links.len()),
            peer_queues: links.iter().map(|_| PeerQueues::default()).collect(),
            links,
            timeout: options.timeout,
            checksums: options.checksums,
            deadlines_checked_at: Instant::now(),
            receive_buffer: CacheLine::zeroed(options.chunk_bytes)?,
            backoff: Backoff::new(),
            ended: Vec::with_capacity(NUM_PREALLOCATED),
            failed: None,
            recorder,
        })
    }

    pub(super) fn enqueue(&mut self, pending: PendingMessage) {
        let lanes = &mut self.peer_queues[pending.peer.0];
        let waiting = match pending.direction {
            Direction::Send => &mut lanes.outgoing.waiting,
            Direction::Receive => &mut lanes.incoming.waiting,
        };
        // Allocated on first use: most pairs of ranks never exchange a message.
        if waiting.capacity() == 0 {
            waiting.reserve(NUM_PREALLOCATED);
        }
        waiting.push_back(pending);
    }

    pub(super) fn is_idle(&self) -> bool {
        self.peer_queues
            .iter()
            .all(|lanes| lanes.outgoing.waiting.is_empty() && lanes.incoming.waiting.is_empty())
    }

    /// Polls for a while, on links where that costs less than sleeping. Returns whether to try to move messages again instead of sleeping.
    pub(super) fn poll_links(&mut self, is_awaited: bool) -> bool {
        let waited_for = || {
            let lanes = self.links.iter().flatten().zip(&self.peer_queues);
            lanes.flat_map(|(link, lanes)| lanes.interests().map(move |interest| (link, interest)))
        };
        if waited_for().any(|(link, _)| link.must_be_tried()) {
            return self.backoff.should_retry(is_awaited);
        }
        waited_for().any(|(link, _)| link.is_worth_polling())
            && self.backoff.poll(is_awaited, || waited_for().any(|(link, interest)| link.is_ready(interest)))
    }

    /// Moves all messages that can make progress. Returns whether any byte moved.
    pub(super) fn advance(&mut self) -> Result<bool, CommError> {
        // A blocked message must reach its deadline even while other messages move.
        if self.deadlines_checked_at.elapsed() >= TICK {
            self.check_deadlines()?;
        }
        let mut has_moved = false;
        for peer in (0..self.links.len()).map(Rank) {
            while self.advance_out(peer)? {
                has_moved = true;
            }
            while self.advance_in(peer)? {
                has_moved = true;
            }
        }
        if has_moved {
            self.backoff.record_success();
        }
        Ok(has_moved)
    }

    fn advance_out(&mut self, peer: Rank) -> Result<bool, CommError> {
        let lane = &mut self.peer_queues[peer.0].outgoing;
        let Some(pending) = lane.waiting.front_mut().filter(|pending| pending.is_movable()) else {
            return Ok(false);
        };
        let number = pending.number;
        pending.storage.wait().inspect_err(|_| self.failed = Some(number))?;
        let link = self.links[peer.0].as_mut().expect("messages go to other ranks");
        let (dtype, len) = pending.operation.elements();
        let memories = Memories::new(pending.storage.bytes_mut(), dtype, None);
        let (call, outgoing) = lane.moving.get_or_insert_with(|| {
            self.recorder.begin_message(number);
            let call = call(pending.operation, lane.num_completed, pending.issued, self.timeout);
            let outgoing = Outgoing::new(&call, peer, memories.range(&Span::from(0..len)), self.checksums);
            (call, outgoing)
        });
        let moved = outgoing.advance(link, &memories).map_err(|_| call.peer_lost(peer));
        let has_moved = moved.inspect_err(|_| self.failed = Some(number))?;
        let is_done = outgoing.is_done();
        self.ended.extend(lane.record_progress(has_moved, is_done, &self.recorder));
        Ok(has_moved)
    }

    fn advance_in(&mut self, peer: Rank) -> Result<bool, CommError> {
        let own = self.own;
        let lane = &mut self.peer_queues[peer.0].incoming;
        let Some(pending) = lane.waiting.front_mut().filter(|pending| pending.is_movable()) else {
            return Ok(false);
        };
        let number = pending.number;
        pending.storage.wait().inspect_err(|_| self.failed = Some(number))?;
        let link = self.links[peer.0].as_mut().expect("messages come from other ranks");
        let (dtype, len) = pending.operation.elements();
        let mut memories = Memories::new(pending.storage.bytes_mut(), dtype, None);
        let (call, incoming) = lane.moving.get_or_insert_with(|| {
            self.recorder.begin_message(number);
            let call = call(pending.operation, lane.num_completed, pending.issued, self.timeout);
            let incoming = Incoming::new(
                own,
                peer,
                memories.range(&Span::from(0..len)),
                ReceiveAction::Copy,
                self.checksums,
            );
            (call, incoming)
        });
        let piece: &mut [u8] = bytemuck::cast_slice_mut(&mut self.receive_buffer);
        let moved = incoming.advance(call, link, &mut memories, piece, None).map_err(|error| match error {
            ReceiveError::Broken => call.peer_lost(peer),
            ReceiveError::Refused(failure) => failure,
        });
        let has_moved = moved.inspect_err(|_| self.failed = Some(number))?;
        let is_done = incoming.is_done();
        self.ended.extend(lane.record_progress(has_moved, is_done, &self.recorder));
        Ok(has_moved)
    }

    /// Sleeps until a message can make progress, `wakeup` is signalled, or a tick has passed.
    pub(super) fn sleep(&mut self, wakeup: &OwnedFd) -> Result<(), CommError> {
        let mut is_ready = false;
        self.each_interest(|link, interest| is_ready |= link.prepare_sleep(interest).unwrap_or(true));
        if !is_ready {
            let mut polled: Vec<PollFd<'_>> = std::mem::take(&mut self.polled);
            polled.push(PollFd::from_borrowed_fd(wakeup.as_fd(), PollFlags::IN));
            let mut sleep_max = TICK;
            for (link, lanes) in self.links.iter().zip(&self.peer_queues) {
                for interest in lanes.interests() {
                    let link = link.as_ref().expect("messages go to other ranks");
                    let (socket, flags) = link.poll(interest);
                    polled.push(PollFd::from_borrowed_fd(socket, flags));
                    sleep_max = sleep_max.min(link.poll_interval().unwrap_or(TICK));
                }
            }
            let timeout = Timespec::try_from(sleep_max).expect("a tick is short");
            let result = poll(&mut polled, Some(&timeout));
            polled.clear();
            // Keeps the memory of the empty list, and ends its borrows.
            self.polled = polled.into_iter().map(|_| unreachable!("the list is empty")).collect();
            match result {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(self.oldest_call().wait_failed(error.into())),
            }
        }
        self.each_interest(Link::end_sleep);
        self.check_deadlines()
    }

    fn each_interest(&mut self, mut visit: impl FnMut(&mut Link, Interest)) {
        for (link, lanes) in self.links.iter_mut().zip(&self.peer_queues) {
            for interest in lanes.interests() {
                visit(link.as_mut().expect("messages go to other ranks"), interest);
            }
        }
    }

    fn check_deadlines(&mut self) -> Result<(), CommError> {
        self.deadlines_checked_at = Instant::now();
        for (peer, lanes) in self.peer_queues.iter_mut().enumerate() {
            for (pending, sequence) in [
                (lanes.outgoing.waiting.front_mut(), lanes.outgoing.num_completed),
                (lanes.incoming.waiting.front_mut(), lanes.incoming.num_completed),
            ] {
                let Some(pending) = pending else { continue };
                if !pending.is_movable() {
                    // This rank's device holds the message up, not the peer.
                    pending.issued = self.deadlines_checked_at;
                    continue;
                }
                let (elapsed, peer) = (pending.issued.elapsed(), Rank(peer));
                let call = call(pending.operation, sequence, pending.issued, self.timeout);
                if elapsed < stall_threshold(self.timeout) {
                    continue;
                }
                let since = pending.moved.unwrap_or(pending.issued).max(pending.issued);
                if self.recorder.time_since_progress(peer, since) >= self.timeout {
                    self.failed = Some(pending.number);
                    return Err(call.timed_out(Vec::from([peer])));
                }
                if pending.asked.is_none_or(|last| last.elapsed() >= stall_threshold(self.timeout)) {
                    pending.asked = Some(self.deadlines_checked_at);
                    self.recorder.request_progress(peer);
                }
                if elapsed >= stall_warning_threshold(self.timeout) && !pending.has_warned {
                    pending.has_warned = true;
                    self.recorder.report_message_stall(&call, pending.direction, peer, pending.number);
                }
            }
        }
        Ok(())
    }

    fn oldest_call(&self) -> Call {
        let messages = self.peer_queues.iter().flat_map(|lanes| {
            [lanes.outgoing.waiting.front(), lanes.incoming.waiting.front()].into_iter().flatten()
        });
        let oldest = messages.min_by_key(|pending| pending.issued).expect("nobody sleeps without a message");
        call(oldest.operation, 0, oldest.issued, self.timeout)
    }
}

impl Drop for MessageEngine {
    fn drop(&mut self) {
        if self.is_idle() {
            return;
        }
        let is_lent = self.links.iter_mut().flatten().fold(false, |is_lent, link| link.abandon() | is_lent);
        if is_lent {
            std::mem::forget(std::mem::take(&mut self.peer_queues));
        }
    }
}

impl PeerQueues {
    fn interests(&self) -> impl Iterator<Item = Interest> + use<> {
        let may_move =
            |waiting: &VecDeque<PendingMessage>| waiting.front().is_some_and(PendingMessage::is_movable);
        let send = may_move(&self.outgoing.waiting).then_some(Interest::Send);
        let receive = may_move(&self.incoming.waiting).then_some(Interest::Receive);
        [send, receive].into_iter().flatten()
    }
}

impl<T> DirectionQueue<T> {
    /// Records the progress of the first message. Returns its slot and memory if it has completed.
    fn record_progress(
        &mut self,
        has_moved: bool,
        is_done: bool,
        recorder: &GroupRecorder,
    ) -> Option<(usize, Storage)> {
        let pending = self.waiting.front_mut()?;
        if has_moved {
            pending.moved = Some(Instant::now());
            recorder.recorder.heartbeat().beat();
        }
        if !is_done {
            return None;
        }
        recorder.end_message(pending.number);
        self.moving = None;
        self.num_completed += 1;
        self.waiting.pop_front().map(|pending| (pending.slot, pending.storage))
    }
}

fn call(operation: Operation, sequence: u64, started: Instant, timeout: Duration) -> Call {
    Call { is_awaited: false, operation, sequence, started, timeout }
}
