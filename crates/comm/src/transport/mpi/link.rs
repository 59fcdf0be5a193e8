//! Data links over MPI. The header and a short payload of a frame form one message, which is sent from and received into memory of the
//! link. A longer payload follows in fragments, which are sent from and received into the memory of the operation.
#![allow(unsafe_code)]

use super::library::{Failed, Request};
use super::{MpiAddresses, Route};
use crate::transport::Purpose;
use crate::transport::link::Broken;
use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};
use trireme_base::Rank;

/// Maximum bytes of a frame's first message.
const FIRST_BYTES: usize = 1024;
/// Maximum number of messages in flight per direction.
const NUM_IN_FLIGHT_MAX: usize = 8;
/// Time within which bytes that a peer sent before it ended must arrive.
const ARRIVAL_MAX: Duration = Duration::from_secs(1);
/// Interval of polls by a waiting thread: MPI has no file descriptor to sleep on.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_micros(50);

/// One rank's end of a link over MPI, with a socket that shows when the peer's process ends.
pub(crate) struct MpiLink {
    route: Route,
    peer_socket: OwnedFd,
    /// When this rank noticed that the peer's process had ended.
    ended: Option<Instant>,
    /// Length of all fragments of a frame but the last.
    fragment_bytes: usize,
    outgoing: DirectionState,
    incoming: DirectionState,
    /// The part of the incoming first message that the caller has not received.
    rest: std::ops::Range<usize>,
    is_abandoned: bool,
}

/// The state of one direction.
struct DirectionState {
    /// Memory of a frame's first message.
    first: Vec<u8>,
    /// Messages in flight, in order.
    in_flight: VecDeque<InFlightMessage>,
    /// Total bytes of these messages.
    num_bytes_in_flight: usize,
}

struct InFlightMessage {
    request: Request,
    num_bytes: usize,
    /// Whether the message uses the caller's memory, not the link's own.
    is_lent: bool,
}

impl From<Failed> for Broken {
    fn from(_: Failed) -> Self {
        Broken
    }
}

impl MpiLink {
    /// Creates the link. `peer_socket` is a connected stream socket to the peer. `fragment_bytes` must be equal on both sides.
    pub(crate) fn new(
        peer_socket: OwnedFd,
        addresses: &MpiAddresses,
        peer: Rank,
        purpose: Purpose,
        fragment_bytes: usize,
    ) -> Self {
        let route = addresses.route(peer, purpose);
        route.communicator.open();
        MpiLink {
            route,
            peer_socket,
            ended: None,
            fragment_bytes,
            outgoing: DirectionState::new(),
            incoming: DirectionState::new(),
            rest: 0..0,
            is_abandoned: false,
        }
    }

    /// Sends a header, or an empty slice once the header was sent, and its payload. Returns the number of bytes of both that MPI has
    /// finished with. Until MPI has finished with all, the caller must not change the payload, and must call again with the rest.
    pub(crate) fn send(&mut self, header: &[u8], payload: &[u8]) -> Result<usize, Broken> {
        let Route { communicator, peer, outgoing_tag: tag, .. } = self.route;
        let direction = &mut self.outgoing;
        let num_bytes = header.len() + payload.len();
        while direction.num_bytes_in_flight < num_bytes && direction.in_flight.len() < NUM_IN_FLIGHT_MAX {
            let is_lent = direction.num_bytes_in_flight >= header.len();
            let message = if is_lent {
                let fragment = &payload[direction.num_bytes_in_flight - header.len()..];
                &fragment[..fragment.len().min(self.fragment_bytes)]
            } else {
                direction.first.clear();
                direction.first.extend_from_slice(header);
                direction.first.extend_from_slice(if num_bytes <= FIRST_BYTES { payload } else { &[] });
                &direction.first
            };
            // SAFETY: see "Lent memory" for the payload. The link keeps its own memory until the message has completed, and forever if it
            // does not.
            let request = unsafe { communicator.send(message, peer, tag)? };
            let num_bytes = message.len();
            direction.push(InFlightMessage { request, num_bytes, is_lent });
        }
        let mut num_done = 0;
        while let Some((flight, _)) = direction.next_ended()? {
            num_done += flight.num_bytes;
        }
        self.check(num_done)
    }

    /// Receives a frame's header, all of it or nothing.
    pub(crate) fn receive_header(&mut self, header: &mut [u8]) -> Result<usize, Broken> {
        if !self.rest.is_empty() {
            return Err(Broken);
        }
        let Route { communicator, peer, incoming_tag: tag, .. } = self.route;
        let direction = &mut self.incoming;
        if direction.in_flight.is_empty() {
            direction.first.resize(FIRST_BYTES, 0);
            // SAFETY: the link keeps its own memory until the message has completed, and forever if it does not.
            let request = unsafe { communicator.receive(&mut direction.first, peer, tag)? };
            direction.push(InFlightMessage { request, num_bytes: FIRST_BYTES, is_lent: false });
        }
        let Some((_, num_received)) = direction.next_ended()? else { return self.check(0) };
        header.copy_from_slice(direction.first[..num_received].get(..header.len()).ok_or(Broken)?);
        self.rest = header.len()..num_received;
        Ok(header.len())
    }

    /// Receives into `bytes`, whose end must be the end of the payload or of a fragment. Returns the number of leading bytes that have
    /// arrived. The caller must keep the other bytes, and call again with them until all have arrived.
    pub(crate) fn receive(&mut self, bytes: &mut [u8]) -> Result<usize, Broken> {
        if !self.rest.is_empty() {
            let num_bytes = self.rest.len().min(bytes.len());
            let from = self.rest.start;
            bytes[..num_bytes].copy_from_slice(&self.incoming.first[from..from + num_bytes]);
            self.rest.start += num_bytes;
            return Ok(num_bytes);
        }
        let Route { communicator, peer, incoming_tag: tag, .. } = self.route;
        let direction = &mut self.incoming;
        while direction.num_bytes_in_flight < bytes.len() && direction.in_flight.len() < NUM_IN_FLIGHT_MAX {
            let free = &mut bytes[direction.num_bytes_in_flight..];
            let num_bytes = free.len().min(self.fragment_bytes);
            // SAFETY: see "Lent memory"; these bytes do not overlap those that earlier messages fill.
            let request = unsafe { communicator.receive(&mut free[..num_bytes], peer, tag)? };
            direction.push(InFlightMessage { request, num_bytes, is_lent: true });
        }
        let mut num_done = 0;
        while let Some((flight, num_received)) = direction.next_ended()? {
            if num_received != flight.num_bytes {
                return Err(Broken);
            }
            num_done += num_received;
        }
        self.check(num_done)
    }

    /// Fails if the link has transferred nothing for [`ARRIVAL_MAX`] after its peer ended.
    fn check(&self, num_moved: usize) -> Result<usize, Broken> {
        match self.ended {
            Some(ended) if num_moved == 0 && ended.elapsed() > ARRIVAL_MAX => Err(Broken),
            _ => Ok(num_moved),
        }
    }

    pub(crate) fn end_sleep(&mut self) {
        match recv(&self.peer_socket, &mut [0; 64][..], RecvFlags::DONTWAIT) {
            Ok((_, 1..)) | Err(Errno::AGAIN | Errno::INTR) => {}
            Ok((_, 0)) | Err(_) => {
                self.ended.get_or_insert_with(Instant::now);
            }
        }
    }

    pub(crate) fn poll(&self) -> (BorrowedFd<'_>, PollFlags) {
        (self.peer_socket.as_fd(), PollFlags::IN)
    }

    /// Ends the use of the link. Returns whether MPI still has memory passed to it, which then must never be freed.
    pub(crate) fn abandon(&mut self) -> bool {
        self.is_abandoned = true;
        [&self.outgoing, &self.incoming]
            .iter()
            .any(|direction| direction.in_flight.iter().any(|flight| flight.is_lent))
    }
}

impl Drop for MpiLink {
    fn drop(&mut self) {
        let directions = [&mut self.outgoing, &mut self.incoming];
        if !self.is_abandoned && directions.iter().all(|direction| direction.in_flight.is_empty()) {
            self.route.communicator.close();
            return;
        }
        for direction in directions {
            if !direction.in_flight.is_empty() {
                // MPI may still access this memory.
                std::mem::forget(std::mem::take(&mut direction.first));
            }
        }
    }
}

impl DirectionState {
    fn new() -> Self {
        DirectionState {
            first: Vec::with_capacity(FIRST_BYTES),
            in_flight: VecDeque::with_capacity(NUM_IN_FLIGHT_MAX),
            num_bytes_in_flight: 0,
        }
    }

    fn push(&mut self, flight: InFlightMessage) {
        self.num_bytes_in_flight += flight.num_bytes;
        self.in_flight.push_back(flight);
    }

    /// Removes and returns the oldest message if it has completed, with the number of bytes received.
    fn next_ended(&mut self) -> Result<Option<(InFlightMessage, usize)>, Broken> {
        let Some(flight) = self.in_flight.front_mut() else { return Ok(None) };
        let ended = match flight.request.test() {
            Ok(None) => return Ok(None),
            Ok(Some(num_received)) => Ok(num_received),
            Err(failed) => Err(failed.into()),
        };
        let flight = self.in_flight.pop_front().expect("there is an oldest one");
        self.num_bytes_in_flight -= flight.num_bytes;
        ended.map(|num_received| Some((flight, num_received)))
    }
}
