use super::{Broken, Interest, Link};
use rustix::event::PollFlags;
use std::os::fd::BorrowedFd;

/// Number of consecutive bytes on one connection.
const STRIPE_BYTES: u64 = 128 << 10;

/// Several connections to one peer, over which one byte stream is striped. The stream may be faster than one connection, whose limits are
/// its window of unacknowledged bytes, its network path and its queue in the network device.
///
/// A connection may transfer bytes that follow the pending bytes of another one. So the caller's bytes must not change until all of them
/// are done.
pub(crate) struct StripedLink {
    connections: Vec<Link>,
    sending: StreamState,
    receiving: StreamState,
}

/// The state of one direction.
struct StreamState {
    /// Number of stream bytes that were reported to the caller as done.
    num_done: u64,
    /// Position in the stream of each connection's next byte.
    next: Vec<u64>,
}

impl StripedLink {
    /// Creates the link. Both sides must pass the connections in the same order.
    pub(crate) fn new(connections: Vec<Link>) -> Self {
        let direction = || StreamState {
            num_done: 0,
            next: (0..connections.len() as u64).map(|index| index * STRIPE_BYTES).collect(),
        };
        StripedLink { sending: direction(), receiving: direction(), connections }
    }

    pub(super) fn send(&mut self, header: &[u8], payload: &[u8]) -> Result<usize, Broken> {
        self.sending.advance(header.len() + payload.len(), |index, part| {
            let split = |at: usize| (at.min(header.len()), at.saturating_sub(header.len()));
            let ((header_start, start), (header_end, end)) = (split(part.start), split(part.end));
            let (header, payload) = (&header[header_start..header_end], &payload[start..end]);
            self.connections[index].send(header, payload, false)
        })
    }

    pub(super) fn receive(&mut self, bytes: &mut [u8]) -> Result<usize, Broken> {
        self.receiving.advance(bytes.len(), |index, part| self.connections[index].receive(&mut bytes[part]))
    }

    /// Polls the connection that carries the next byte of the stream: no byte is done before this connection makes progress.
    pub(super) fn poll(&self, interest: Interest) -> (BorrowedFd<'_>, PollFlags) {
        let direction = match interest {
            Interest::Send => &self.sending,
            Interest::Receive => &self.receiving,
        };
        let index = direction.num_done / STRIPE_BYTES % self.connections.len() as u64;
        self.connections[index as usize].poll(interest)
    }
}

impl StreamState {
    /// Makes every connection transfer its stripes of the next `len` bytes, as far as possible. Returns the number of leading bytes that
    /// are done. `transfer` gets the index of a connection and a range of the bytes.
    fn advance(
        &mut self,
        len: usize,
        mut transfer: impl FnMut(usize, std::ops::Range<usize>) -> Result<usize, Broken>,
    ) -> Result<usize, Broken> {
        let (start, num_connections) = (self.num_done, self.next.len() as u64);
        let end = start + len as u64;
        for (index, next) in self.next.iter_mut().enumerate() {
            while *next < end {
                let stripe_end = (*next / STRIPE_BYTES + 1) * STRIPE_BYTES;
                let part = (*next - start) as usize..(stripe_end.min(end) - start) as usize;
                let part_len = part.len();
                let num_moved = transfer(index, part)?;
                *next += num_moved as u64;
                if *next == stripe_end {
                    *next += (num_connections - 1) * STRIPE_BYTES;
                }
                if num_moved < part_len {
                    break;
                }
            }
        }
        let first = self.next.iter().copied().min().expect("there are connections");
        self.num_done = first.min(end);
        Ok((self.num_done - start) as usize)
    }
}
