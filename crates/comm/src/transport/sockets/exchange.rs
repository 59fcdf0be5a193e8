use super::frame::{HEADER_BYTES, Header};
use crate::control::{Control, TICK};
use crate::element::reduce_into;
use crate::engine::{Call, Cost};
use crate::{CommError, Operation};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, recv, sendmsg};
use std::io::IoSlice;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::time::Instant;
use trireme_base::{DType, Rank, ReduceOp};
use trireme_schedule::collective::{self, Action, Side};

/// The bytes an operation works on, and how they are reduced.
pub(super) struct Vector<'a> {
    bytes: &'a mut [u8],
    element_bytes: usize,
    reduction: Option<(DType, ReduceOp)>,
}

impl<'a> Vector<'a> {
    /// Bytes that are only moved.
    pub(super) fn bytes(bytes: &'a mut [u8]) -> Self {
        Vector { bytes, element_bytes: 1, reduction: None }
    }

    /// The vector of an all-reduce or a broadcast.
    pub(super) fn of(operation: Operation, bytes: &'a mut [u8]) -> Self {
        match operation {
            Operation::AllReduce { op, dtype, .. } => {
                Vector { bytes, element_bytes: dtype.size(), reduction: Some((dtype, op)) }
            }
            Operation::Broadcast { dtype, .. } => {
                Vector { bytes, element_bytes: dtype.size(), reduction: None }
            }
            Operation::AllGatherBytes | Operation::Barrier => unreachable!("{operation} has no vector"),
        }
    }

    fn byte_range(&self, elements: &Range<usize>) -> Range<usize> {
        elements.start * self.element_bytes..elements.end * self.element_bytes
    }
}

/// One step under way: a message out and one in, whichever can move first.
pub(super) struct Exchange<'a> {
    call: &'a Call,
    outgoing: Option<Outgoing<'a>>,
    incoming: Option<Incoming<'a>>,
}

struct Outgoing<'a> {
    to: Rank,
    socket: &'a OwnedFd,
    header: [u8; HEADER_BYTES],
    range: Range<usize>,
    /// Header and payload bytes sent.
    num_sent: usize,
}

struct Incoming<'a> {
    from: Rank,
    own: Rank,
    socket: &'a OwnedFd,
    header: [u8; HEADER_BYTES],
    num_header_bytes: usize,
    range: Range<usize>,
    action: Action,
    /// Payload bytes that are in their place.
    num_placed: usize,
    /// Payload bytes after those, in the piece that waits to be reduced.
    num_pending: usize,
}

/// A failed system call on a data connection, or its end.
struct Broken;

impl<'a> Exchange<'a> {
    pub(super) fn new(
        own: Rank,
        call: &'a Call,
        (send, receive): (&Option<collective::Outgoing>, &Option<collective::Incoming>),
        peers: &'a [Option<OwnedFd>],
        vector: &Vector<'_>,
    ) -> Self {
        let socket = |rank: Rank| peers[rank.0].as_ref().expect("no algorithm sends to oneself");
        let outgoing = send.as_ref().map(|send| {
            let range = vector.byte_range(&send.span.range);
            let header = Header::new(call, range.len()).encode();
            Outgoing { to: send.to, socket: socket(send.to), header, range, num_sent: 0 }
        });
        let incoming = receive.as_ref().map(|receive| Incoming {
            from: receive.from,
            own,
            socket: socket(receive.from),
            header: [0; HEADER_BYTES],
            num_header_bytes: 0,
            range: vector.byte_range(&receive.span.range),
            action: receive.action,
            num_placed: 0,
            num_pending: 0,
        });
        Exchange { call, outgoing, incoming }
    }

    /// Moves both messages to their ends. `piece` holds incoming bytes until they are reduced.
    pub(super) fn run(
        mut self,
        vector: &mut Vector<'_>,
        piece: &mut [u8],
        control: &mut Control,
        cost: &mut Cost,
    ) -> Result<(), CommError> {
        loop {
            let mut has_moved = false;
            if let Some(outgoing) = &mut self.outgoing {
                has_moved |= outgoing
                    .advance(vector)
                    .map_err(|Broken| control.reason_of_break(outgoing.to, self.call))?;
                if outgoing.is_done() {
                    cost.payload_bytes += outgoing.range.len() as u64;
                }
            }
            self.outgoing.take_if(|outgoing| outgoing.is_done());
            let unsent = self.outgoing.as_ref().map(Outgoing::unsent);
            if let Some(incoming) = &mut self.incoming {
                has_moved |= incoming.advance(self.call, vector, piece, unsent.as_ref(), control)?;
            }
            self.incoming.take_if(|incoming| incoming.is_done());
            if self.outgoing.is_none() && self.incoming.is_none() {
                return Ok(());
            }
            if !has_moved {
                self.wait(piece.len(), control, cost)?;
            }
        }
    }

    /// Sleeps until something can move, a peer speaks on its control connection, or a tick is over.
    fn wait(&self, piece_bytes: usize, control: &mut Control, cost: &mut Cost) -> Result<(), CommError> {
        let since = Instant::now();
        let watched = PollFd::new(control, PollFlags::IN);
        let out = self.outgoing.as_ref().map(|outgoing| PollFd::new(outgoing.socket, PollFlags::OUT));
        let readable = self.incoming.as_ref().filter(|incoming| !incoming.is_held(piece_bytes));
        let inward = readable.map(|incoming| PollFd::new(incoming.socket, PollFlags::IN));
        let mut polled = [watched.clone(), out.unwrap_or(watched.clone()), inward.unwrap_or(watched.clone())];
        let timeout = Timespec::try_from(TICK).expect("a tick is short");
        match poll(&mut polled, Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(self.call.wait_failed(error.into())),
        }
        cost.waiting += since.elapsed();
        control.tick(self.call)
    }
}

impl Outgoing<'_> {
    /// Sends what the socket takes; whether that was anything.
    fn advance(&mut self, vector: &Vector<'_>) -> Result<bool, Broken> {
        let header = &self.header[self.num_sent.min(HEADER_BYTES)..];
        let slices = [IoSlice::new(header), IoSlice::new(&vector.bytes[self.unsent()])];
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match sendmsg(self.socket, &slices, &mut SendAncillaryBuffer::default(), flags) {
            Ok(num_sent) => {
                self.num_sent += num_sent;
                Ok(num_sent > 0)
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            Err(_) => Err(Broken),
        }
    }

    fn is_done(&self) -> bool {
        self.num_sent == HEADER_BYTES + self.range.len()
    }

    /// The part of the vector that must stay as it is.
    fn unsent(&self) -> Range<usize> {
        self.range.start + self.num_sent.saturating_sub(HEADER_BYTES)..self.range.end
    }
}

impl Incoming<'_> {
    /// Receives what has come and puts it in its place; whether that was anything. `unsent` is not written
    /// to.
    fn advance(
        &mut self,
        call: &Call,
        vector: &mut Vector<'_>,
        piece: &mut [u8],
        unsent: Option<&Range<usize>>,
        control: &mut Control,
    ) -> Result<bool, CommError> {
        let header_was_done = self.num_header_bytes == HEADER_BYTES;
        let moved = if !header_was_done {
            self.receive_header()
        } else {
            match self.action {
                Action::Reduce { own } => self.receive_piece(vector, own, piece, unsent),
                Action::Copy => self.receive_in_place(vector),
            }
        };
        let has_moved = moved.map_err(|Broken| control.reason_of_break(self.from, call))?;
        if !header_was_done && self.num_header_bytes == HEADER_BYTES {
            self.check_header(call)?;
        }
        Ok(has_moved)
    }

    fn receive_header(&mut self) -> Result<bool, Broken> {
        let num_read = read(self.socket, &mut self.header[self.num_header_bytes..])?;
        self.num_header_bytes += num_read;
        Ok(num_read > 0)
    }

    fn receive_in_place(&mut self, vector: &mut Vector<'_>) -> Result<bool, Broken> {
        let num_read =
            read(self.socket, &mut vector.bytes[self.range.start + self.num_placed..self.range.end])?;
        self.num_placed += num_read;
        Ok(num_read > 0)
    }

    fn receive_piece(
        &mut self,
        vector: &mut Vector<'_>,
        side: Side,
        piece: &mut [u8],
        unsent: Option<&Range<usize>>,
    ) -> Result<bool, Broken> {
        let piece_bytes = self.piece_bytes(piece.len());
        let num_read = read(self.socket, &mut piece[self.num_pending..piece_bytes])?;
        self.num_pending += num_read;
        let start = self.range.start + self.num_placed;
        let target = start..start + piece_bytes;
        let is_free = unsent.is_none_or(|unsent| target.end <= unsent.start || unsent.end <= target.start);
        if self.num_pending < piece_bytes || !is_free {
            return Ok(num_read > 0);
        }
        let (dtype, op) = vector.reduction.expect("only reductions have reducing steps");
        reduce_into(&mut vector.bytes[target], &piece[..piece_bytes], dtype, op, side);
        self.num_placed += piece_bytes;
        self.num_pending = 0;
        Ok(true)
    }

    /// The length of the piece being received.
    fn piece_bytes(&self, piece_bytes_max: usize) -> usize {
        (self.range.len() - self.num_placed).min(piece_bytes_max)
    }

    /// Whether the piece is whole but its place not yet free: reading on must wait for the sender in us.
    fn is_held(&self, piece_bytes_max: usize) -> bool {
        self.num_pending > 0 && self.num_pending == self.piece_bytes(piece_bytes_max)
    }

    fn is_done(&self) -> bool {
        self.num_header_bytes == HEADER_BYTES && self.num_placed == self.range.len()
    }

    fn check_header(&self, call: &Call) -> Result<(), CommError> {
        let Some(header) = Header::decode(&self.header) else {
            return Err(call.protocol(self.from, "its frame does not begin with a header"));
        };
        if header.operation != call.operation {
            return Err(call.mismatch(self.own, self.from, header.operation));
        }
        let expected = Header::new(call, self.range.len());
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

/// Reads what has come without waiting: 0 if nothing has, or `bytes` is empty.
fn read(socket: &OwnedFd, bytes: &mut [u8]) -> Result<usize, Broken> {
    if bytes.is_empty() {
        return Ok(0);
    }
    match recv(socket, bytes, RecvFlags::DONTWAIT) {
        Ok((_, 0)) => Err(Broken),
        Ok((_, num_read)) => Ok(num_read),
        Err(Errno::AGAIN | Errno::INTR) => Ok(0),
        Err(_) => Err(Broken),
    }
}
