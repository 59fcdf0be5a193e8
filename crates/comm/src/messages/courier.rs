use crate::buffer::{CacheLine, Storage};
use crate::engine::Call;
use crate::transport::link::{Interest, Link};
use crate::transport::linked::{Incoming, Memories, Outgoing, Trouble};
use crate::{CommError, Operation};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};
use trireme_base::Rank;
use trireme_schedule::collective::{Action, Span};

/// How long a sleep lasts at most before the deadlines are looked at again.
const TICK: Duration = Duration::from_millis(50);

/// Which way a message goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    Out,
    In,
}

/// A message that was issued.
pub(super) struct Parcel {
    /// Who waits for it.
    pub(super) slot: usize,
    pub(super) peer: Rank,
    pub(super) direction: Direction,
    pub(super) operation: Operation,
    pub(super) storage: Storage,
    pub(super) issued: Instant,
}

/// Moves messages between this rank and its peers. Those of one pair of ranks and one direction go in the order of
/// issue; all others go independently.
pub(super) struct Courier {
    own: Rank,
    links: Vec<Option<Link>>,
    lanes: Vec<Lanes>,
    timeout: Duration,
    piece: Vec<CacheLine>,
    /// Memory for the list of what is waited for.
    polled: Vec<PollFd<'static>>,
    /// Messages that have ended, with what came of them.
    pub(super) ended: Vec<(usize, Storage)>,
}

#[derive(Default)]
struct Lanes {
    outgoing: Lane<Outgoing>,
    incoming: Lane<Incoming>,
}

struct Lane<T> {
    waiting: VecDeque<Parcel>,
    /// The first of them, once it is under way.
    moving: Option<(Call, T)>,
    num_begun: u64,
}

impl<T> Default for Lane<T> {
    fn default() -> Self {
        Lane { waiting: VecDeque::new(), moving: None, num_begun: 0 }
    }
}

impl Courier {
    pub(super) fn new(
        own: Rank,
        links: Vec<Option<Link>>,
        timeout: Duration,
        chunk_bytes: usize,
    ) -> Result<Self, CommError> {
        Ok(Courier {
            own,
            lanes: links.iter().map(|_| Lanes::default()).collect(),
            links,
            timeout,
            piece: CacheLine::zeroed(chunk_bytes)?,
            polled: Vec::new(),
            ended: Vec::new(),
        })
    }

    pub(super) fn take(&mut self, parcel: Parcel) {
        let lanes = &mut self.lanes[parcel.peer.0];
        match parcel.direction {
            Direction::Out => lanes.outgoing.waiting.push_back(parcel),
            Direction::In => lanes.incoming.waiting.push_back(parcel),
        }
    }

    /// Whether there is nothing to move.
    pub(super) fn is_idle(&self) -> bool {
        self.lanes.iter().all(|lanes| lanes.outgoing.waiting.is_empty() && lanes.incoming.waiting.is_empty())
    }

    /// Whether looking again soon costs less than sleeping.
    pub(super) fn is_worth_spinning(&self) -> bool {
        self.links.iter().flatten().any(Link::is_worth_spinning)
    }

    /// Moves what moves; whether that was anything.
    pub(super) fn advance(&mut self) -> Result<bool, CommError> {
        let mut has_moved = false;
        for peer in (0..self.links.len()).map(Rank) {
            while self.advance_out(peer)? {
                has_moved = true;
            }
            while self.advance_in(peer)? {
                has_moved = true;
            }
        }
        Ok(has_moved)
    }

    fn advance_out(&mut self, peer: Rank) -> Result<bool, CommError> {
        let lane = &mut self.lanes[peer.0].outgoing;
        let Some(parcel) = lane.waiting.front_mut() else { return Ok(false) };
        let link = self.links[peer.0].as_mut().expect("messages go to other ranks");
        let (dtype, len) = parcel.operation.elements();
        let memories = Memories::new(parcel.storage.bytes_mut(), dtype, None);
        let (call, outgoing) = lane.moving.get_or_insert_with(|| {
            let call = call(parcel.operation, lane.num_begun, parcel.issued, self.timeout);
            let outgoing = Outgoing::new(&call, peer, memories.place(&Span::vector(0..len)));
            (call, outgoing)
        });
        let has_moved = outgoing.advance(link, &memories).map_err(|_| call.peer_lost(peer))?;
        if outgoing.is_done() {
            self.ended.extend(lane.end());
        }
        Ok(has_moved)
    }

    fn advance_in(&mut self, peer: Rank) -> Result<bool, CommError> {
        let own = self.own;
        let lane = &mut self.lanes[peer.0].incoming;
        let Some(parcel) = lane.waiting.front_mut() else { return Ok(false) };
        let link = self.links[peer.0].as_mut().expect("messages come from other ranks");
        let (dtype, len) = parcel.operation.elements();
        let mut memories = Memories::new(parcel.storage.bytes_mut(), dtype, None);
        let (call, incoming) = lane.moving.get_or_insert_with(|| {
            let call = call(parcel.operation, lane.num_begun, parcel.issued, self.timeout);
            let incoming = Incoming::new(own, peer, memories.place(&Span::vector(0..len)), Action::Copy);
            (call, incoming)
        });
        let piece: &mut [u8] = bytemuck::cast_slice_mut(&mut self.piece);
        let has_moved =
            incoming.advance(call, link, &mut memories, piece, None).map_err(|trouble| match trouble {
                Trouble::Broken => call.peer_lost(peer),
                Trouble::Refused(failure) => failure,
            })?;
        if incoming.is_done() {
            self.ended.extend(lane.end());
        }
        Ok(has_moved)
    }

    /// Sleeps until something can move, `bell` is rung, or a tick is over.
    pub(super) fn sleep(&mut self, bell: &OwnedFd) -> Result<(), CommError> {
        let mut is_ready = false;
        self.each_interest(|link, interest| is_ready |= link.prepare_sleep(interest).unwrap_or(true));
        if !is_ready {
            let mut polled: Vec<PollFd<'_>> = std::mem::take(&mut self.polled);
            polled.push(PollFd::from_borrowed_fd(bell.as_fd(), PollFlags::IN));
            for (link, lanes) in self.links.iter().zip(&self.lanes) {
                for interest in lanes.interests() {
                    let (socket, flags) = link.as_ref().expect("messages go to other ranks").poll(interest);
                    polled.push(PollFd::from_borrowed_fd(socket, flags));
                }
            }
            let timeout = Timespec::try_from(TICK).expect("a tick is short");
            let result = poll(&mut polled, Some(&timeout));
            polled.clear();
            // The list is empty: this keeps its memory, and ends its borrows.
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
        for (link, lanes) in self.links.iter_mut().zip(&self.lanes) {
            for interest in lanes.interests() {
                visit(link.as_mut().expect("messages go to other ranks"), interest);
            }
        }
    }

    fn check_deadlines(&self) -> Result<(), CommError> {
        for (peer, lanes) in self.lanes.iter().enumerate() {
            for (parcel, num_begun) in [
                (lanes.outgoing.waiting.front(), lanes.outgoing.num_begun),
                (lanes.incoming.waiting.front(), lanes.incoming.num_begun),
            ] {
                if let Some(parcel) = parcel.filter(|parcel| parcel.issued.elapsed() >= self.timeout) {
                    let call = call(parcel.operation, num_begun, parcel.issued, self.timeout);
                    return Err(call.timed_out(Vec::from([Rank(peer)])));
                }
            }
        }
        Ok(())
    }

    fn oldest_call(&self) -> Call {
        let parcels = self.lanes.iter().flat_map(|lanes| {
            [lanes.outgoing.waiting.front(), lanes.incoming.waiting.front()].into_iter().flatten()
        });
        let oldest = parcels.min_by_key(|parcel| parcel.issued).expect("nobody sleeps without a message");
        call(oldest.operation, 0, oldest.issued, self.timeout)
    }
}

impl Lanes {
    fn interests(&self) -> impl Iterator<Item = Interest> + use<> {
        let send = (!self.outgoing.waiting.is_empty()).then_some(Interest::Send);
        let receive = (!self.incoming.waiting.is_empty()).then_some(Interest::Receive);
        [send, receive].into_iter().flatten()
    }
}

impl<T> Lane<T> {
    fn end(&mut self) -> Option<(usize, Storage)> {
        self.moving = None;
        self.num_begun += 1;
        self.waiting.pop_front().map(|parcel| (parcel.slot, parcel.storage))
    }
}

fn call(operation: Operation, sequence: u64, started: Instant, timeout: Duration) -> Call {
    Call { operation, sequence, started, timeout }
}
