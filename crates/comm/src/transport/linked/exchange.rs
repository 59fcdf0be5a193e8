use super::frame::{HEADER_BYTES, Header};
use super::memories::{Memories, Place};
use crate::CommError;
use crate::control::{Control, TICK};
use crate::engine::{Call, Cost};
use crate::patience::Patience;
use crate::transport::link::{Broken, Interest, Link};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::time::Instant;
use trireme_base::Rank;
use trireme_schedule::collective::{self, Action};

/// Why a message does not go on.
pub(crate) enum Trouble {
    /// The connection broke.
    Broken,
    /// The peer sent something else.
    Refused(CommError),
}

impl From<Broken> for Trouble {
    fn from(_: Broken) -> Self {
        Trouble::Broken
    }
}

/// One step under way: a message out and one in, whichever can move first.
pub(super) struct Exchange<'a> {
    call: &'a Call,
    outgoing: Option<Outgoing>,
    incoming: Option<Incoming>,
}

/// A message on its way out.
pub(crate) struct Outgoing {
    to: Rank,
    header: [u8; HEADER_BYTES],
    place: Place,
    /// Header and payload bytes sent.
    num_sent: usize,
}

/// A message on its way in.
pub(crate) struct Incoming {
    from: Rank,
    own: Rank,
    header: [u8; HEADER_BYTES],
    num_header_bytes: usize,
    place: Place,
    action: Action,
    /// Whether bytes lie in the piece before they get to their place.
    is_buffered: bool,
    /// Payload bytes that are in their place.
    num_placed: usize,
    /// Payload bytes after those, in the piece.
    num_pending: usize,
}

impl<'a> Exchange<'a> {
    pub(super) fn new(
        own: Rank,
        call: &'a Call,
        (send, receive): (Option<&collective::Outgoing>, Option<&collective::Incoming>),
        memories: &Memories<'_>,
    ) -> Self {
        let outgoing = send.map(|send| Outgoing::new(call, send.to, memories.place(&send.span)));
        let incoming = receive.map(|receive| {
            let mut incoming =
                Incoming::new(own, receive.from, memories.place(&receive.span), receive.action);
            let is_overwriting =
                outgoing.as_ref().is_some_and(|outgoing: &Outgoing| outgoing.place.overlaps(&incoming.place));
            incoming.is_buffered |= is_overwriting;
            incoming
        });
        Exchange { call, outgoing, incoming }
    }

    /// Moves both messages to their ends. `piece` holds incoming bytes until they get to their place.
    pub(super) fn run(
        mut self,
        links: &mut [Option<Link>],
        memories: &mut Memories<'_>,
        piece: &mut [u8],
        patience: &mut Patience,
        control: &mut Control,
        cost: &mut Cost,
    ) -> Result<(), CommError> {
        loop {
            let mut has_moved = false;
            if let Some(outgoing) = &mut self.outgoing {
                has_moved |= outgoing
                    .advance(link_to(links, outgoing.to), memories)
                    .map_err(|Broken| control.reason_of_break(outgoing.to, self.call))?;
                if outgoing.is_done() {
                    cost.payload_bytes += outgoing.place.len() as u64;
                }
            }
            self.outgoing.take_if(|outgoing| outgoing.is_done());
            let unsent = self.outgoing.as_ref().map(Outgoing::unsent);
            if let Some(incoming) = &mut self.incoming {
                let link = link_to(links, incoming.from);
                has_moved |= incoming.advance(self.call, link, memories, piece, unsent.as_ref()).map_err(
                    |trouble| match trouble {
                        Trouble::Broken => control.reason_of_break(incoming.from, self.call),
                        Trouble::Refused(failure) => failure,
                    },
                )?;
            }
            self.incoming.take_if(|incoming| incoming.is_done());
            if self.outgoing.is_none() && self.incoming.is_none() {
                return Ok(());
            }
            if has_moved {
                patience.has_succeeded();
            } else if !self.look(links, piece.len(), patience) {
                self.wait(links, piece.len(), control, cost)?;
            }
        }
    }

    /// Looks for a while whether something can move, where that costs less than sleeping.
    fn look(&self, links: &mut [Option<Link>], piece_bytes: usize, patience: &mut Patience) -> bool {
        let interests = self.interests(piece_bytes);
        let mut waited_for = interests.into_iter().flatten();
        if waited_for.any(|(rank, _)| link_to(links, rank).must_be_tried()) {
            return patience.tries_again(self.call.is_awaited);
        }
        let mut waited_for = interests.into_iter().flatten();
        waited_for.any(|(rank, _)| link_to(links, rank).is_worth_looking())
            && patience.look(self.call.is_awaited, || {
                let mut waited_for = interests.into_iter().flatten();
                waited_for.any(|(rank, interest)| link_to(links, rank).is_ready(interest))
            })
    }

    /// What this rank waits for, and from whom.
    fn interests(&self, piece_bytes: usize) -> [Option<(Rank, Interest)>; 2] {
        let incoming = self.incoming.as_ref().filter(|incoming| !incoming.is_held(piece_bytes));
        [
            self.outgoing.as_ref().map(|outgoing| (outgoing.to, Interest::Send)),
            incoming.map(|incoming| (incoming.from, Interest::Receive)),
        ]
    }

    /// Sleeps until something can move, a peer speaks on its control connection, or a tick is over.
    fn wait(
        &self,
        links: &mut [Option<Link>],
        piece_bytes: usize,
        control: &mut Control,
        cost: &mut Cost,
    ) -> Result<(), CommError> {
        let since = Instant::now();
        let interests = self.interests(piece_bytes);
        let mut is_ready = false;
        for (rank, interest) in interests.into_iter().flatten() {
            is_ready |= link_to(links, rank)
                .prepare_sleep(interest)
                .map_err(|Broken| control.reason_of_break(rank, self.call))?;
        }
        if !is_ready {
            self.sleep(links, interests, control)?;
        }
        for (rank, interest) in interests.into_iter().flatten() {
            link_to(links, rank).end_sleep(interest);
        }
        cost.waiting += since.elapsed();
        control.tick(self.call)
    }

    fn sleep(
        &self,
        links: &[Option<Link>],
        interests: [Option<(Rank, Interest)>; 2],
        control: &Control,
    ) -> Result<(), CommError> {
        let watched = PollFd::new(control, PollFlags::IN);
        let mut polled = [watched.clone(), watched.clone(), watched];
        let mut sleep_max = TICK;
        for (polled, (rank, interest)) in polled.iter_mut().zip(interests.into_iter().flatten()) {
            let link = links[rank.0].as_ref().expect("no algorithm sends to oneself");
            let (socket, flags) = link.poll(interest);
            *polled = PollFd::from_borrowed_fd(socket, flags);
            sleep_max = sleep_max.min(link.nap().unwrap_or(TICK));
        }
        let timeout = Timespec::try_from(sleep_max).expect("a tick is short");
        match poll(&mut polled, Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(self.call.wait_failed(error.into())),
        }
    }
}

fn link_to(links: &mut [Option<Link>], rank: Rank) -> &mut Link {
    links[rank.0].as_mut().expect("no algorithm sends to oneself")
}

impl Outgoing {
    pub(crate) fn new(call: &Call, to: Rank, place: Place) -> Self {
        Outgoing { to, header: Header::new(call, place.len()).encode(), place, num_sent: 0 }
    }

    /// Sends what goes; whether that was anything.
    pub(crate) fn advance(&mut self, link: &mut Link, memories: &Memories<'_>) -> Result<bool, Broken> {
        let header = &self.header[self.num_sent.min(HEADER_BYTES)..];
        let num_sent = link.send(header, memories.bytes(&self.unsent()))?;
        self.num_sent += num_sent;
        Ok(num_sent > 0)
    }

    pub(crate) fn is_done(&self) -> bool {
        self.num_sent == HEADER_BYTES + self.place.len()
    }

    /// The part that must stay as it is.
    fn unsent(&self) -> Place {
        self.place.part(self.num_sent.saturating_sub(HEADER_BYTES), self.place.len())
    }
}

impl Incoming {
    pub(crate) fn new(own: Rank, from: Rank, place: Place, action: Action) -> Self {
        Incoming {
            from,
            own,
            header: [0; HEADER_BYTES],
            num_header_bytes: 0,
            place,
            action,
            is_buffered: action != Action::Copy,
            num_placed: 0,
            num_pending: 0,
        }
    }

    /// Receives what has come and puts it in its place; whether that was anything. `unsent` is not written
    /// to.
    pub(crate) fn advance(
        &mut self,
        call: &Call,
        link: &mut Link,
        memories: &mut Memories<'_>,
        piece: &mut [u8],
        unsent: Option<&Place>,
    ) -> Result<bool, Trouble> {
        let header_was_done = self.num_header_bytes == HEADER_BYTES;
        let has_moved = if !header_was_done {
            self.receive_header(link)?
        } else if self.is_buffered {
            self.receive_piece(link, memories, piece, unsent)?
        } else {
            self.receive_in_place(link, memories)?
        };
        if !header_was_done && self.num_header_bytes == HEADER_BYTES {
            self.check_header(call).map_err(Trouble::Refused)?;
        }
        Ok(has_moved)
    }

    fn receive_header(&mut self, link: &mut Link) -> Result<bool, Broken> {
        let num_read = link.receive_header(&mut self.header[self.num_header_bytes..])?;
        self.num_header_bytes += num_read;
        Ok(num_read > 0)
    }

    fn receive_in_place(&mut self, link: &mut Link, memories: &mut Memories<'_>) -> Result<bool, Broken> {
        let rest = self.place.part(self.num_placed, self.place.len());
        let num_read = link.receive(memories.bytes_mut(&rest))?;
        self.num_placed += num_read;
        Ok(num_read > 0)
    }

    fn receive_piece(
        &mut self,
        link: &mut Link,
        memories: &mut Memories<'_>,
        piece: &mut [u8],
        unsent: Option<&Place>,
    ) -> Result<bool, Broken> {
        let piece_bytes = self.piece_bytes(piece.len());
        let num_read = link.receive(&mut piece[self.num_pending..piece_bytes])?;
        self.num_pending += num_read;
        let target = self.place.part(self.num_placed, self.num_placed + piece_bytes);
        if self.num_pending < piece_bytes || unsent.is_some_and(|unsent| unsent.overlaps(&target)) {
            return Ok(num_read > 0);
        }
        match self.action {
            Action::Copy => memories.bytes_mut(&target).copy_from_slice(&piece[..piece_bytes]),
            Action::Reduce { own } => memories.reduce(&target, &piece[..piece_bytes], own),
        }
        self.num_placed += piece_bytes;
        self.num_pending = 0;
        Ok(true)
    }

    /// The length of the piece being received.
    fn piece_bytes(&self, piece_bytes_max: usize) -> usize {
        (self.place.len() - self.num_placed).min(piece_bytes_max)
    }

    /// Whether the piece is whole but its place not yet free: reading on must wait for the sender in us.
    fn is_held(&self, piece_bytes_max: usize) -> bool {
        self.num_pending > 0 && self.num_pending == self.piece_bytes(piece_bytes_max)
    }

    pub(crate) fn is_done(&self) -> bool {
        self.num_header_bytes == HEADER_BYTES && self.num_placed == self.place.len()
    }

    fn check_header(&self, call: &Call) -> Result<(), CommError> {
        let Some(header) = Header::decode(&self.header) else {
            return Err(call.protocol(self.from, "its frame does not begin with a header"));
        };
        if header.operation != call.operation {
            return Err(call.mismatch(self.own, self.from, header.operation));
        }
        let expected = Header::new(call, self.place.len());
        if header != expected {
            return Err(call.protocol(
                self.from,
                format!(
                    "its frame has {} bytes of operation {}, where {} bytes of operation {} belong",
                    header.payload_bytes, header.sequence, expected.payload_bytes, expected.sequence
                ),
            ));
        }
        Ok(())
    }
}
