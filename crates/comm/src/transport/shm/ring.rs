use super::atomics::{AtomicU32, AtomicU64, Ordering, fence};
use super::ring_memory::RingMemory;
use std::ops::Range;

/// The state of a byte queue with one writer and one reader, from one rank to another of the same host. Zeroed memory is an empty ring.
#[derive(Default)]
#[repr(C)]
pub(super) struct State {
    /// Total bytes written. Only the sender writes it.
    written: CachePadded<AtomicU64>,
    /// Total bytes read. Only the receiver writes it.
    read: CachePadded<AtomicU64>,
    /// Whether the receiver sleeps until bytes are written.
    receiver_sleeps: CachePadded<AtomicU32>,
    /// Whether the sender sleeps until bytes are read.
    sender_sleeps: CachePadded<AtomicU32>,
}

/// Separates values written by different ranks by pairs of cache lines, which processors fetch together.
#[derive(Default)]
#[repr(C, align(128))]
struct CachePadded<T>(T);

/// The peer's counter has a value that a ring cannot have.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Corrupt;

pub(crate) struct RingSender {
    memory: RingMemory,
    written: u64,
}

pub(crate) struct RingReceiver {
    memory: RingMemory,
    read: u64,
}

/// Up to two ranges of the ring that hold `len` bytes from stream position `position` on.
fn pieces(position: u64, len: usize) -> [Range<usize>; 2] {
    let start = (position % RingMemory::CAPACITY as u64) as usize;
    let first = len.min(RingMemory::CAPACITY - start);
    [start..start + first, 0..len - first]
}

impl RingSender {
    /// The sending end of a ring in this rank's arena.
    pub(super) fn new(memory: RingMemory) -> Self {
        RingSender { memory, written: 0 }
    }

    /// Writes as many of `bytes` as fit. Returns their number.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<usize, Corrupt> {
        let room = self.room()?;
        let len = room.min(bytes.len());
        let mut rest = &bytes[..len];
        for piece in pieces(self.written, len) {
            let (from, after) = rest.split_at(piece.len());
            // SAFETY: the reader has read these bytes, or they were never written: it does not access them until `written` covers them.
            unsafe { self.memory.write(piece.start, from) };
            rest = after;
        }
        self.written += len as u64;
        self.memory.state().written.0.store(self.written, Ordering::Release);
        Ok(len)
    }

    pub(crate) fn has_room(&self) -> Result<bool, Corrupt> {
        Ok(self.room()? > 0)
    }

    fn room(&self) -> Result<usize, Corrupt> {
        let read = self.memory.state().read.0.load(Ordering::Acquire);
        match self.written.checked_sub(read) {
            Some(unread) if unread <= RingMemory::CAPACITY as u64 => {
                Ok(RingMemory::CAPACITY - unread as usize)
            }
            _ => Err(Corrupt),
        }
    }

    /// Whether the receiver must be woken after a write. Clears its flag.
    pub(crate) fn take_sleep_flag(&self) -> bool {
        take_flag(&self.memory.state().receiver_sleeps.0)
    }

    /// Announces that this end is about to sleep until there is room. Returns whether there is room already.
    pub(crate) fn prepare_sleep(&self) -> Result<bool, Corrupt> {
        announce(&self.memory.state().sender_sleeps.0);
        self.has_room()
    }

    pub(crate) fn end_sleep(&self) {
        self.memory.state().sender_sleeps.0.store(0, Ordering::Relaxed);
    }
}

impl RingReceiver {
    /// The receiving end of a ring in a peer's arena.
    pub(super) fn new(memory: RingMemory) -> Self {
        RingReceiver { memory, read: 0 }
    }

    /// Reads available bytes, at most `bytes.len()`. Returns their number.
    pub(crate) fn read(&mut self, bytes: &mut [u8]) -> Result<usize, Corrupt> {
        let len = self.unread()?.min(bytes.len());
        let mut rest = &mut bytes[..len];
        for piece in pieces(self.read, len) {
            let (to, after) = rest.split_at_mut(piece.len());
            // SAFETY: the sender has written these bytes, and does not access them until `read` covers them.
            unsafe { self.memory.read(piece.start, to) };
            rest = after;
        }
        self.read += len as u64;
        self.memory.state().read.0.store(self.read, Ordering::Release);
        Ok(len)
    }

    /// Whether there are unread bytes.
    pub(crate) fn has_unread(&self) -> Result<bool, Corrupt> {
        Ok(self.unread()? > 0)
    }

    fn unread(&self) -> Result<usize, Corrupt> {
        let written = self.memory.state().written.0.load(Ordering::Acquire);
        match written.checked_sub(self.read) {
            Some(unread) if unread <= RingMemory::CAPACITY as u64 => Ok(unread as usize),
            _ => Err(Corrupt),
        }
    }

    /// Whether the sender must be woken after a read. Clears its flag.
    pub(crate) fn take_sleep_flag(&self) -> bool {
        take_flag(&self.memory.state().sender_sleeps.0)
    }

    /// Announces that this end is about to sleep until bytes are written. Returns whether there are unread bytes already.
    pub(crate) fn prepare_sleep(&self) -> Result<bool, Corrupt> {
        announce(&self.memory.state().receiver_sleeps.0);
        self.has_unread()
    }

    pub(crate) fn end_sleep(&self) {
        self.memory.state().receiver_sleeps.0.store(0, Ordering::Relaxed);
    }
}

/// Sets the flag of a rank that will sleep, before it reads the peer's counter a last time. The peer writes its counter before it reads the
/// flag, so either this rank sees the new counter, or the peer sees the flag.
fn announce(flag: &AtomicU32) {
    // A plain store would be enough: a peer's swap that read an older value precedes the store in the modification order, and so does not
    // overwrite it. Loom does not model that.
    flag.swap(1, Ordering::Relaxed);
    fence(Ordering::SeqCst);
}

/// Clears the flag of a sleeping rank. Returns whether it was set. Must be called after the counter was written.
fn take_flag(flag: &AtomicU32) -> bool {
    fence(Ordering::SeqCst);
    flag.load(Ordering::Relaxed) == 1 && flag.swap(0, Ordering::Relaxed) == 1
}
