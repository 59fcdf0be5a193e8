use super::Conditions;
use super::delay_queue::DelayQueue;
use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Instant;

/// Bytes of one read. Few, so that a slow line forwards them evenly.
const PIECE_BYTES: usize = 16 << 10;
/// Number of bytes in flight above which nothing is read, so that the sender has to wait.
const HELD_BYTES_MAX: usize = 1 << 20;

/// One direction of a TCP connection through a relay.
pub(super) struct Flow {
    queue: DelayQueue<Vec<u8>>,
    arrived: VecDeque<u8>,
    num_read: u64,
    state: State,
}

#[derive(PartialEq, Eq)]
enum State {
    Open,
    SourceEnded,
    /// The end was forwarded to the destination.
    EndForwarded,
}

impl Flow {
    pub(super) fn new(conditions: Conditions) -> Self {
        Flow { queue: DelayQueue::new(conditions), arrived: VecDeque::new(), num_read: 0, state: State::Open }
    }

    /// Reads the available bytes without blocking, and inverts the bytes with the indices `corrupted`.
    pub(super) fn read(
        &mut self,
        mut source: &TcpStream,
        corrupted: impl Iterator<Item = u64> + Clone,
    ) -> io::Result<()> {
        let mut piece = [0; PIECE_BYTES];
        while self.can_read() {
            let Some(num_bytes) = if_ready(source.read(&mut piece))? else { return Ok(()) };
            let piece = &mut piece[..num_bytes];
            if piece.is_empty() {
                self.state = State::SourceEnded;
            }
            for index in corrupted.clone().filter_map(|byte| byte.checked_sub(self.num_read)) {
                if let Some(byte) = piece.get_mut(index as usize) {
                    *byte = !*byte;
                }
            }
            self.num_read += num_bytes as u64;
            self.queue.send(Instant::now(), num_bytes, piece.to_vec());
        }
        Ok(())
    }

    /// Writes as many of the arrived bytes as possible without blocking.
    pub(super) fn write(&mut self, mut destination: &TcpStream) -> io::Result<()> {
        let now = Instant::now();
        while let Some(piece) = self.queue.receive(now) {
            self.arrived.extend(piece);
        }
        while self.wants_to_write() {
            let Some(num_bytes) = if_ready(destination.write(self.arrived.as_slices().0))? else {
                return Ok(());
            };
            self.arrived.drain(..num_bytes);
        }
        if self.state == State::SourceEnded && self.queue.next_arrival().is_none() {
            destination.shutdown(Shutdown::Write)?;
            self.state = State::EndForwarded;
        }
        Ok(())
    }

    pub(super) fn can_read(&self) -> bool {
        self.state == State::Open && self.queue.num_bytes() + self.arrived.len() < HELD_BYTES_MAX
    }

    pub(super) fn wants_to_write(&self) -> bool {
        !self.arrived.is_empty()
    }

    pub(super) fn next_arrival(&self) -> Option<Instant> {
        self.queue.next_arrival()
    }

    pub(super) fn has_ended(&self) -> bool {
        self.state == State::EndForwarded
    }
}

fn if_ready(outcome: io::Result<usize>) -> io::Result<Option<usize>> {
    match outcome {
        Ok(num_bytes) => Ok(Some(num_bytes)),
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}
