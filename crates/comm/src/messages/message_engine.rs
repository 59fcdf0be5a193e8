use super::device_lane::DeviceLane;
use crate::backoff::Backoff;
use crate::buffer::{CacheLine, Storage};
use crate::call::Call;
use crate::control::{TICK, stall_threshold, stall_warning_threshold};
use crate::recorder::{Direction, GroupRecorder};
use crate::transport::device::{DeviceResources, POLL_INTERVAL};
use crate::transport::link::{Interest, Link};
use crate::transport::link_transport::{Incoming, Memories, Outgoing, ReceiveError};
use crate::{CommError, GroupOptions, Operation};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};
use trireme_base::{DType, DeviceTransportError, Rank};
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
    devices: DeviceResources,
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
    device: DeviceLane,
}

impl<T> Default for DirectionQueue<T> {
    fn default() -> Self {
        DirectionQueue {
            waiting: VecDeque::new(),
            moving: None,
            num_completed: 0,
            device: DeviceLane::default(),
        }
    }
}

impl MessageEngine {
    pub(super) fn new(
        own: Rank,
        links: Vec<Option<Link>>,
        devices: DeviceResources,
        options: &GroupOptions,
        recorder: GroupRecorder,
    ) -> Result<Self, CommError> {
        Ok(MessageEngine {
            own,
            polled: Vec::with_capacity(1 + 2 * links.len()),
            peer_queues: links.iter().map(|_| PeerQueues::default()).collect(),
            links,
            devices,
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
        if lane.device.is_transferring {
            let ended = lane.advance_transfer(&self.recorder).inspect_err(|_| self.failed = Some(number))?;
            self.ended.extend(ended);
            return Ok(!lane.device.is_transferring);
        }
        let link = self.links[peer.0].as_mut().expect("messages go to other ranks");
        let new_call = call(pending.operation, lane.num_completed, pending.issued, self.timeout);
        let payload = payload(pending, &mut lane.device, &self.devices);
        let payload = payload.map_err(|failure| new_call.device_failure(failure));
        let payload = payload.inspect_err(|_| self.failed = Some(number))?;
        let num_bytes = payload.len();
        let memories = Memories::new(payload, DType::U8, None);
        let (call, outgoing) = lane.moving.get_or_insert_with(|| {
            self.recorder.begin_message(number);
            let outgoing =
                Outgoing::new(&new_call, peer, memories.range(&Span::from(0..num_bytes)), self.checksums);
            (new_call, outgoing)
        });
        let moved = outgoing.advance(link, &memories).map_err(|_| call.peer_lost(peer));
        let has_moved = moved.inspect_err(|_| self.failed = Some(number))?;
        let is_done = outgoing.is_done();
        let ended = lane.record_progress(has_moved, is_done, &self.devices, &self.recorder);
        self.ended.extend(ended.inspect_err(|_| self.failed = Some(number))?);
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
        if lane.device.is_transferring {
            let ended = lane.advance_transfer(&self.recorder).inspect_err(|_| self.failed = Some(number))?;
            self.ended.extend(ended);
            return Ok(!lane.device.is_transferring);
        }
        let link = self.links[peer.0].as_mut().expect("messages come from other ranks");
        let new_call = call(pending.operation, lane.num_completed, pending.issued, self.timeout);
        let payload = payload(pending, &mut lane.device, &self.devices);
        let payload = payload.map_err(|failure| new_call.device_failure(failure));
        let payload = payload.inspect_err(|_| self.failed = Some(number))?;
        let num_bytes = payload.len();
        let mut memories = Memories::new(payload, DType::U8, None);
        let (call, incoming) = lane.moving.get_or_insert_with(|| {
            self.recorder.begin_message(number);
            let range = memories.range(&Span::from(0..num_bytes));
            (new_call, Incoming::new(own, peer, range, ReceiveAction::Copy, self.checksums))
        });
        let piece: &mut [u8] = bytemuck::cast_slice_mut(&mut self.receive_buffer);
        let moved = incoming.advance(call, link, &mut memories, piece, None).map_err(|error| match error {
            ReceiveError::Broken => call.peer_lost(peer),
            ReceiveError::Refused(failure) => failure,
        });
        let has_moved = moved.inspect_err(|_| self.failed = Some(number))?;
        let is_done = incoming.is_done();
        let ended = lane.record_progress(has_moved, is_done, &self.devices, &self.recorder);
        self.ended.extend(ended.inspect_err(|_| self.failed = Some(number))?);
        Ok(has_moved)
    }

    /// Sleeps until a message can make progress, `wakeup` is signalled, or a tick has passed.
    pub(super) fn sleep(&mut self, wakeup: &OwnedFd) -> Result<(), CommError> {
        let mut is_ready = false;
        self.each_interest(|link, interest| is_ready |= link.prepare_sleep(interest).unwrap_or(true));
        if !is_ready {
            let mut polled: Vec<PollFd<'_>> = std::mem::take(&mut self.polled);
            polled.push(PollFd::from_borrowed_fd(wakeup.as_fd(), PollFlags::IN));
            let is_transferring = self.peer_queues.iter().any(PeerQueues::is_transferring);
            let mut sleep_max = if is_transferring { POLL_INTERVAL } else { TICK };
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
        let send = self.outgoing.needs_link().then_some(Interest::Send);
        let receive = self.incoming.needs_link().then_some(Interest::Receive);
        [send, receive].into_iter().flatten()
    }

    /// Whether devices transfer a message.
    fn is_transferring(&self) -> bool {
        self.outgoing.device.is_transferring || self.incoming.device.is_transferring
    }
}

impl<T> DirectionQueue<T> {
    /// Whether the first message moves over the link.
    fn needs_link(&self) -> bool {
        !self.device.is_transferring && self.waiting.front().is_some_and(PendingMessage::is_movable)
    }

    /// Records the progress of the first message on the link. If it is through, and the vector is in memory of a device, starts the
    /// transfer. Otherwise, returns its slot and memory if it has completed.
    fn record_progress(
        &mut self,
        has_moved: bool,
        is_done: bool,
        devices: &DeviceResources,
        recorder: &GroupRecorder,
    ) -> Result<Option<(usize, Storage)>, CommError> {
        let Some(pending) = self.waiting.front_mut() else { return Ok(None) };
        if has_moved {
            pending.moved = Some(Instant::now());
            recorder.recorder.heartbeat().beat();
        }
        if !is_done {
            return Ok(None);
        }
        let Some(span) = pending.storage.device_span() else { return Ok(self.complete(recorder)) };
        let begun = self.device.begin(pending.direction, span, devices.transport());
        let (call, _) = self.moving.as_ref().expect("the frame was in flight");
        begun.map(|()| None).map_err(|failure| call.device_failure(failure))
    }

    /// Returns the slot and memory of the first message if devices have transferred it.
    fn advance_transfer(&mut self, recorder: &GroupRecorder) -> Result<Option<(usize, Storage)>, CommError> {
        let is_done = self.device.is_done().map_err(|failure| {
            let (call, _) = self.moving.as_ref().expect("the message is in flight");
            call.device_failure(failure)
        })?;
        if !is_done {
            return Ok(None);
        }
        recorder.recorder.heartbeat().beat();
        Ok(self.complete(recorder))
    }

    fn complete(&mut self, recorder: &GroupRecorder) -> Option<(usize, Storage)> {
        let pending = self.waiting.pop_front()?;
        recorder.end_message(pending.number);
        self.moving = None;
        self.num_completed += 1;
        Some((pending.slot, pending.storage))
    }
}

/// Returns the payload of a message's frame: its vector, unless devices transfer that.
fn payload<'a>(
    pending: &'a mut PendingMessage,
    lane: &'a mut DeviceLane,
    devices: &DeviceResources,
) -> Result<&'a mut [u8], DeviceTransportError> {
    if pending.storage.is_on_device() {
        lane.frame(pending.direction, devices.transport())
    } else {
        Ok(pending.storage.bytes_mut())
    }
}

fn call(operation: Operation, sequence: u64, started: Instant, timeout: Duration) -> Call {
    Call { is_awaited: false, operation, sequence, started, timeout }
}
