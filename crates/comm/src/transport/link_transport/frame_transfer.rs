//! Messages in flight: sends, receives and checks frames, each as far as its link makes progress.

use super::frame::{CHECKSUM_BYTES, Checksum, HEADER_BYTES, Header};
use super::memories::{Memories, MemoryRange};
use crate::CommError;
use crate::call::Call;
use crate::transport::link::{Broken, Link};
use trireme_base::Rank;
use trireme_schedule::collective::ReceiveAction;

/// The reason why a message cannot continue.
pub(crate) enum ReceiveError {
    Broken,
    /// The peer sent a frame that does not match.
    Refused(CommError),
}

impl From<Broken> for ReceiveError {
    fn from(_: Broken) -> Self {
        ReceiveError::Broken
    }
}

/// The checksum of a frame in flight, and the number of checksum bytes that were transferred.
#[derive(Default)]
struct Trailer {
    checksum: Checksum,
    bytes: [u8; CHECKSUM_BYTES],
    num_moved: usize,
}

pub(crate) struct Outgoing {
    pub(super) to: Rank,
    header: [u8; HEADER_BYTES],
    pub(super) range: MemoryRange,
    /// Number of header and payload bytes sent.
    num_sent: usize,
    /// As in [`Link::send`].
    may_zero_copy: bool,
    trailer: Option<Trailer>,
}

pub(crate) struct Incoming {
    pub(super) from: Rank,
    own: Rank,
    header: [u8; HEADER_BYTES],
    num_header_bytes: usize,
    range: MemoryRange,
    action: ReceiveAction,
    /// Whether payload bytes are received into a separate buffer first, and then copied or reduced into `range`.
    is_buffered: bool,
    /// Number of payload bytes that were written to `range`.
    num_placed: usize,
    /// Number of payload bytes after these that are still in the separate buffer.
    num_pending: usize,
    trailer: Option<Trailer>,
}

impl Outgoing {
    pub(crate) fn new(call: &Call, to: Rank, place: MemoryRange, has_checksum: bool) -> Self {
        let header = Header::new(call, place.len(), has_checksum).encode();
        let trailer = has_checksum.then(Trailer::default);
        Outgoing { to, header, range: place, num_sent: 0, may_zero_copy: true, trailer }
    }

    /// Sends as much as possible. Returns whether any byte was sent.
    pub(crate) fn advance(&mut self, link: &mut Link, memories: &Memories<'_>) -> Result<bool, Broken> {
        let (unsent, frame_bytes) = (self.unsent(), HEADER_BYTES + self.range.len());
        if let Some(trailer) = self.trailer.as_mut().filter(|_| self.num_sent == frame_bytes) {
            let num_sent = link.send(&trailer.bytes[trailer.num_moved..], &[], self.may_zero_copy)?;
            trailer.num_moved += num_sent;
            return Ok(num_sent > 0);
        }
        let header = &self.header[self.num_sent.min(HEADER_BYTES)..];
        let payload = memories.bytes(&unsent);
        let num_sent = link.send(header, payload, self.may_zero_copy)?;
        self.num_sent += num_sent;
        if let Some(trailer) = &mut self.trailer {
            let num_header_bytes = num_sent.min(header.len());
            trailer.checksum.add(&header[..num_header_bytes]);
            trailer.checksum.add(&payload[..num_sent - num_header_bytes]);
            trailer.bytes = trailer.checksum.to_bytes();
        }
        Ok(num_sent > 0)
    }

    pub(crate) fn is_done(&self) -> bool {
        self.num_sent == HEADER_BYTES + self.range.len()
            && self.trailer.as_ref().is_none_or(|trailer| trailer.num_moved == CHECKSUM_BYTES)
    }

    /// The part of the payload that is not sent yet, and must not change.
    pub(super) fn unsent(&self) -> MemoryRange {
        self.range.part(self.num_sent.saturating_sub(HEADER_BYTES), self.range.len())
    }
}

impl Incoming {
    pub(crate) fn new(
        own: Rank,
        from: Rank,
        place: MemoryRange,
        action: ReceiveAction,
        has_checksum: bool,
    ) -> Self {
        Incoming {
            from,
            own,
            header: [0; HEADER_BYTES],
            num_header_bytes: 0,
            range: place,
            action,
            is_buffered: action != ReceiveAction::Copy,
            num_placed: 0,
            num_pending: 0,
            trailer: has_checksum.then(Trailer::default),
        }
    }

    /// If the message overwrites memory that `outgoing` sends, keeps its bytes in the separate buffer until that memory was sent. The peer
    /// does the same, and so may receive only after it has sent: neither rank may use zero-copy sends.
    pub(super) fn buffer_if_overlapping(&mut self, outgoing: &mut Outgoing) {
        if outgoing.range.overlaps(&self.range) {
            self.is_buffered = true;
            outgoing.may_zero_copy = false;
        }
    }

    /// Receives the bytes that have arrived and moves them to their place. Returns whether there was progress. `buffer` is the separate
    /// buffer. `unsent` is not written to.
    pub(crate) fn advance(
        &mut self,
        call: &Call,
        link: &mut Link,
        memories: &mut Memories<'_>,
        buffer: &mut [u8],
        unsent: Option<&MemoryRange>,
    ) -> Result<bool, ReceiveError> {
        if self.num_header_bytes < HEADER_BYTES {
            let has_moved = self.receive_header(link)?;
            if self.num_header_bytes == HEADER_BYTES {
                self.check_header(call).map_err(ReceiveError::Refused)?;
            }
            return Ok(has_moved);
        }
        if self.num_placed == self.range.len() {
            return self.receive_checksum(call, link);
        }
        let has_moved = if self.is_buffered {
            self.receive_piece(link, memories, buffer, unsent)?
        } else {
            self.receive_in_place(link, memories)?
        };
        Ok(has_moved)
    }

    fn receive_header(&mut self, link: &mut Link) -> Result<bool, Broken> {
        let rest = &mut self.header[self.num_header_bytes..];
        let num_read = link.receive_header(rest)?;
        add_to(&mut self.trailer, &rest[..num_read]);
        self.num_header_bytes += num_read;
        Ok(num_read > 0)
    }

    fn receive_in_place(&mut self, link: &mut Link, memories: &mut Memories<'_>) -> Result<bool, Broken> {
        let rest = memories.bytes_mut(&self.range.part(self.num_placed, self.range.len()));
        let num_read = link.receive(rest)?;
        add_to(&mut self.trailer, &rest[..num_read]);
        self.num_placed += num_read;
        Ok(num_read > 0)
    }

    fn receive_piece(
        &mut self,
        link: &mut Link,
        memories: &mut Memories<'_>,
        buffer: &mut [u8],
        unsent: Option<&MemoryRange>,
    ) -> Result<bool, Broken> {
        let piece_bytes = self.piece_bytes(buffer.len());
        let rest = &mut buffer[self.num_pending..piece_bytes];
        let num_read = link.receive(rest)?;
        add_to(&mut self.trailer, &rest[..num_read]);
        self.num_pending += num_read;
        let target = self.range.part(self.num_placed, self.num_placed + piece_bytes);
        if self.num_pending < piece_bytes || unsent.is_some_and(|unsent| unsent.overlaps(&target)) {
            return Ok(num_read > 0);
        }
        match self.action {
            ReceiveAction::Copy => memories.bytes_mut(&target).copy_from_slice(&buffer[..piece_bytes]),
            ReceiveAction::Reduce { own_side: own } => memories.reduce(&target, &buffer[..piece_bytes], own),
        }
        self.num_placed += piece_bytes;
        self.num_pending = 0;
        Ok(true)
    }

    fn receive_checksum(&mut self, call: &Call, link: &mut Link) -> Result<bool, ReceiveError> {
        let Some(trailer) = &mut self.trailer else { return Ok(false) };
        let num_read = link.receive_header(&mut trailer.bytes[trailer.num_moved..])?;
        trailer.num_moved += num_read;
        if trailer.num_moved == CHECKSUM_BYTES && trailer.bytes != trailer.checksum.to_bytes() {
            let what = "the checksum of its frame does not match: bytes changed on the way";
            return Err(ReceiveError::Refused(call.protocol(self.from, what)));
        }
        Ok(num_read > 0)
    }

    /// Length of the piece that is being received.
    fn piece_bytes(&self, piece_bytes_max: usize) -> usize {
        (self.range.len() - self.num_placed).min(piece_bytes_max)
    }

    /// Whether the separate buffer is full, and its bytes belong in memory that is not sent yet. Receiving must then wait for this rank's
    /// outgoing message.
    pub(super) fn waits_for_outgoing(&self, piece_bytes_max: usize) -> bool {
        self.num_pending > 0 && self.num_pending == self.piece_bytes(piece_bytes_max)
    }

    pub(crate) fn is_done(&self) -> bool {
        self.num_header_bytes == HEADER_BYTES
            && self.num_placed == self.range.len()
            && self.trailer.as_ref().is_none_or(|trailer| trailer.num_moved == CHECKSUM_BYTES)
    }

    fn check_header(&self, call: &Call) -> Result<(), CommError> {
        let Some(header) = Header::decode(&self.header) else {
            return Err(call.protocol(self.from, "its frame does not begin with a header"));
        };
        if header.operation != call.operation {
            return Err(call.mismatch(self.own, self.from, header.operation));
        }
        let expected = Header::new(call, self.range.len(), self.trailer.is_some());
        if header.has_checksum != expected.has_checksum {
            let what = if header.has_checksum { "has a checksum" } else { "has no checksum" };
            return Err(call.protocol(self.from, format!("its frame {what}, unlike this rank's")));
        }
        if header != expected {
            return Err(call.protocol(
                self.from,
                format!(
                    "its frame has {} bytes of operation {}, but expected {} bytes of operation {}",
                    header.payload_bytes, header.sequence, expected.payload_bytes, expected.sequence
                ),
            ));
        }
        Ok(())
    }
}

/// Adds received bytes to a frame's checksum, if it has one.
fn add_to(trailer: &mut Option<Trailer>, bytes: &[u8]) {
    if let Some(trailer) = trailer {
        trailer.checksum.add(bytes);
    }
}
