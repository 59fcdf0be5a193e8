use super::frame_transfer::{Incoming, Outgoing, ReceiveError};
use super::memories::Memories;
use crate::CommError;
use crate::backoff::Backoff;
use crate::call::Call;
use crate::control::{Control, TICK};
use crate::transport::link::{Broken, Interest, Link};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use std::time::Instant;
use trireme_base::Rank;
use trireme_schedule::collective;

/// One step in flight: an outgoing and an incoming message, which make progress independently.
pub(super) struct Exchange<'a> {
    call: &'a Call,
    outgoing: Option<Outgoing>,
    incoming: Option<Incoming>,
}

impl<'a> Exchange<'a> {
    pub(super) fn new(
        own: Rank,
        call: &'a Call,
        send: Option<&collective::Outgoing>,
        receive: Option<&collective::Incoming>,
        memories: &Memories<'_>,
        has_checksum: bool,
    ) -> Self {
        let mut outgoing =
            send.map(|send| Outgoing::new(call, send.to, memories.range(&send.span), has_checksum));
        let incoming = receive.map(|receive| {
            let place = memories.range(&receive.span);
            let mut incoming = Incoming::new(own, receive.from, place, receive.action, has_checksum);
            if let Some(outgoing) = &mut outgoing {
                incoming.buffer_if_overlapping(outgoing);
            }
            incoming
        });
        Exchange { call, outgoing, incoming }
    }

    /// Transfers both messages completely. Incoming bytes that are not received directly into their place go through a buffer, one piece at
    /// a time.
    pub(super) fn run(
        mut self,
        links: &mut [Option<Link>],
        memories: &mut Memories<'_>,
        buffer: &mut [u8],
        backoff: &mut Backoff,
        control: &mut Control,
    ) -> Result<(), CommError> {
        loop {
            let mut has_moved = false;
            if let Some(outgoing) = &mut self.outgoing {
                has_moved |= outgoing
                    .advance(link_to(links, outgoing.to), memories)
                    .map_err(|Broken| control.reason_of_break(outgoing.to, self.call))?;
                if outgoing.is_done() {
                    control.call_statistics.payload_bytes += outgoing.range.len() as u64;
                }
            }
            self.outgoing.take_if(|outgoing| outgoing.is_done());
            let unsent = self.outgoing.as_ref().map(Outgoing::unsent);
            if let Some(incoming) = &mut self.incoming {
                let link = link_to(links, incoming.from);
                has_moved |= incoming.advance(self.call, link, memories, buffer, unsent.as_ref()).map_err(
                    |error| match error {
                        ReceiveError::Broken => control.reason_of_break(incoming.from, self.call),
                        ReceiveError::Refused(failure) => failure,
                    },
                )?;
            }
            self.incoming.take_if(|incoming| incoming.is_done());
            if self.outgoing.is_none() && self.incoming.is_none() {
                return Ok(());
            }
            if has_moved {
                backoff.record_success();
                control.record_progress();
            } else if !self.poll_links(links, buffer.len(), backoff) {
                self.wait(links, buffer.len(), control)?;
            }
        }
    }

    /// Polls for a while, on links where that costs less than sleeping. Returns whether to try to transfer bytes again instead of sleeping.
    fn poll_links(&self, links: &mut [Option<Link>], piece_bytes: usize, backoff: &mut Backoff) -> bool {
        let interests = self.interests(piece_bytes);
        let mut waited_for = interests.into_iter().flatten();
        if waited_for.any(|(rank, _)| link_to(links, rank).must_be_tried()) {
            return backoff.should_retry(self.call.is_awaited);
        }
        let mut waited_for = interests.into_iter().flatten();
        waited_for.any(|(rank, _)| link_to(links, rank).is_worth_polling())
            && backoff.poll(self.call.is_awaited, || {
                let mut waited_for = interests.into_iter().flatten();
                waited_for.any(|(rank, interest)| link_to(links, rank).is_ready(interest))
            })
    }

    /// The peers and directions that this rank waits for.
    fn interests(&self, piece_bytes: usize) -> [Option<(Rank, Interest)>; 2] {
        let incoming = self.incoming.as_ref().filter(|incoming| !incoming.waits_for_outgoing(piece_bytes));
        [
            self.outgoing.as_ref().map(|outgoing| (outgoing.to, Interest::Send)),
            incoming.map(|incoming| (incoming.from, Interest::Receive)),
        ]
    }

    /// Sleeps until a message can make progress, a notice arrives, or a tick has passed.
    fn wait(
        &self,
        links: &mut [Option<Link>],
        piece_bytes: usize,
        control: &mut Control,
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
        control.call_statistics.waiting += since.elapsed();
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
            sleep_max = sleep_max.min(link.poll_interval().unwrap_or(TICK));
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
