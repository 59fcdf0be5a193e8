use super::mapping::Mapping;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// Bytes that fit into a ring. A multiple of any element, so that no element of an aligned message is torn.
const CAPACITY: usize = 256 << 10;
/// What one ring takes in its sender's arena.
pub(crate) const RING_BYTES: usize = size_of::<State>() + CAPACITY;

/// One direction between two ranks of a host: a queue of bytes with one writer and one reader. Zero memory is an
/// empty ring.
#[repr(C)]
struct State {
    /// Bytes ever written; only the sender writes it.
    written: Line<AtomicU64>,
    /// Bytes ever read; only the receiver writes it.
    read: Line<AtomicU64>,
    /// The receiver sleeps until something is written.
    receiver_sleeps: Line<AtomicU32>,
    /// The sender sleeps until something is read.
    sender_sleeps: Line<AtomicU32>,
}

/// Keeps what is written by different ranks in different cache lines, and in different pairs of lines, which
/// processors fetch together.
#[repr(C, align(128))]
struct Line<T>(T);

/// The peer's counter is none that a ring can have.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Corrupt;

/// A place for a ring in an arena.
struct Place {
    memory: Arc<Mapping>,
    offset: usize,
}

/// The end that writes.
pub(crate) struct RingSender {
    place: Place,
    written: u64,
}

/// The end that reads.
pub(crate) struct RingReceiver {
    place: Place,
    read: u64,
}

impl Place {
    /// # Panics
    /// If the ring is not inside of the memory, or not at a multiple of a line.
    fn new(memory: Arc<Mapping>, offset: usize) -> Self {
        memory.at(offset, RING_BYTES);
        assert!(offset.is_multiple_of(align_of::<State>()), "rings lie at multiples of a line");
        Place { memory, offset }
    }

    fn state(&self) -> &State {
        let start = self.memory.at(self.offset, size_of::<State>());
        // SAFETY: inside of the mapping, which `self` keeps, and aligned, as `new` has checked; a `State` is made of
        // atomics only, and any bits are one.
        unsafe { &*start.cast::<State>() }
    }

    /// Up to two pieces of the ring that hold `len` bytes from the `position`-th one on.
    fn pieces(&self, position: u64, len: usize) -> [(*mut u8, usize); 2] {
        let start = (position % CAPACITY as u64) as usize;
        let first = len.min(CAPACITY - start);
        let data = self.offset + size_of::<State>();
        [(self.memory.at(data + start, first), first), (self.memory.at(data, len - first), len - first)]
    }
}

impl RingSender {
    /// The sending end of the ring at `offset` of this rank's arena.
    pub(crate) fn new(memory: Arc<Mapping>, offset: usize) -> Self {
        RingSender { place: Place::new(memory, offset), written: 0 }
    }

    /// Writes as much of `bytes` as there is room for, and says how much that was.
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<usize, Corrupt> {
        let room = self.room()?;
        let len = room.min(bytes.len());
        let (first, second) = bytes[..len].split_at(len.min(self.place.pieces(self.written, len)[0].1));
        for ((to, len), from) in self.place.pieces(self.written, len).into_iter().zip([first, second]) {
            // SAFETY: `to` points to `len` bytes of the ring that the reader has read, or never got: it does not touch
            // them until `written` says so. `bytes` is no part of the ring, for it is borrowed.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to, len) };
        }
        self.written += len as u64;
        self.place.state().written.0.store(self.written, Ordering::Release);
        Ok(len)
    }

    /// Whether anything can be written.
    pub(crate) fn has_room(&self) -> Result<bool, Corrupt> {
        Ok(self.room()? > 0)
    }

    fn room(&self) -> Result<usize, Corrupt> {
        let read = self.place.state().read.0.load(Ordering::Acquire);
        match self.written.checked_sub(read) {
            Some(unread) if unread <= CAPACITY as u64 => Ok(CAPACITY - unread as usize),
            _ => Err(Corrupt),
        }
    }

    /// Whether the receiver must be woken, after a write.
    pub(crate) fn takes_waking(&self) -> bool {
        takes(&self.place.state().receiver_sleeps.0)
    }

    /// Says that this end is about to sleep until there is room; whether there is some already.
    pub(crate) fn prepare_sleep(&self) -> Result<bool, Corrupt> {
        announce(&self.place.state().sender_sleeps.0);
        self.has_room()
    }

    /// This end is awake again.
    pub(crate) fn end_sleep(&self) {
        self.place.state().sender_sleeps.0.store(0, Ordering::Relaxed);
    }
}

impl RingReceiver {
    /// The receiving end of the ring at `offset` of a peer's arena.
    pub(crate) fn new(memory: Arc<Mapping>, offset: usize) -> Self {
        RingReceiver { place: Place::new(memory, offset), read: 0 }
    }

    /// Reads what has come, at most as much as `bytes` holds, and says how much that was.
    pub(crate) fn read(&mut self, bytes: &mut [u8]) -> Result<usize, Corrupt> {
        let len = self.unread()?.min(bytes.len());
        let mut rest = &mut bytes[..len];
        for (from, len) in self.place.pieces(self.read, len) {
            let (to, after) = rest.split_at_mut(len);
            // SAFETY: `from` points to `len` bytes of the ring that the sender has written, and does not touch until
            // `read` says so. `bytes` is no part of the ring, for it is borrowed.
            unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), len) };
            rest = after;
        }
        self.read += len as u64;
        self.place.state().read.0.store(self.read, Ordering::Release);
        Ok(len)
    }

    /// Whether anything has come that was not read.
    pub(crate) fn has_unread(&self) -> Result<bool, Corrupt> {
        Ok(self.unread()? > 0)
    }

    fn unread(&self) -> Result<usize, Corrupt> {
        let written = self.place.state().written.0.load(Ordering::Acquire);
        match written.checked_sub(self.read) {
            Some(unread) if unread <= CAPACITY as u64 => Ok(unread as usize),
            _ => Err(Corrupt),
        }
    }

    /// Whether the sender must be woken, after a read.
    pub(crate) fn takes_waking(&self) -> bool {
        takes(&self.place.state().sender_sleeps.0)
    }

    /// Says that this end is about to sleep until something is written; whether something is already.
    pub(crate) fn prepare_sleep(&self) -> Result<bool, Corrupt> {
        announce(&self.place.state().receiver_sleeps.0);
        self.has_unread()
    }

    /// This end is awake again.
    pub(crate) fn end_sleep(&self) {
        self.place.state().receiver_sleeps.0.store(0, Ordering::Relaxed);
    }
}

/// Raises the flag of one who will sleep, before it looks at the peer's counter a last time. The peer writes its
/// counter before it looks at the flag, so one of the two sees the other.
fn announce(flag: &AtomicU32) {
    flag.store(1, Ordering::Relaxed);
    fence(Ordering::SeqCst);
}

/// Lowers the flag of one who sleeps; whether it was raised. To be called after the counter was written.
fn takes(flag: &AtomicU32) -> bool {
    fence(Ordering::SeqCst);
    flag.load(Ordering::Relaxed) == 1 && flag.swap(0, Ordering::Relaxed) == 1
}

#[cfg(test)]
mod tests {
    use super::super::arena::Arena;
    use super::*;

    fn ends() -> (RingSender, RingReceiver) {
        let arena = Arena::new(2).expect("an arena");
        let region = arena.allocate_for_good(RING_BYTES).expect("memory");
        (
            RingSender::new(Arc::clone(arena.mapping()), region.offset()),
            RingReceiver::new(Arc::clone(arena.mapping()), region.offset()),
        )
    }

    #[test]
    fn bytes_come_out_as_they_went_in_around_the_end() {
        let (mut sender, mut receiver) = ends();
        let message: Vec<u8> = (0..CAPACITY + 999).map(|index| (index % 251) as u8).collect();
        let (mut num_sent, mut received) = (0, Vec::new());
        let mut piece = vec![0; 7001];
        for round in 0.. {
            num_sent += sender.write(&message[num_sent..]).expect("a sound ring");
            let num_read = receiver.read(&mut piece).expect("a sound ring");
            received.extend_from_slice(&piece[..num_read]);
            if num_read == 0 && num_sent == message.len() {
                assert!(round > 10);
                break;
            }
        }
        assert!(received == message);
    }

    #[test]
    fn a_full_ring_takes_no_more_and_an_empty_one_gives_nothing() {
        let (mut sender, mut receiver) = ends();
        assert_eq!(receiver.read(&mut [0; 8]), Ok(0));
        assert_eq!(sender.write(&vec![1; CAPACITY + 1]), Ok(CAPACITY));
        assert_eq!(sender.write(&[1]), Ok(0));
        assert_eq!(receiver.read(&mut [0; 8]), Ok(8));
        assert_eq!(sender.write(&[1; 9]), Ok(8));
    }

    #[test]
    fn a_sleeper_is_woken_once() {
        let (mut sender, mut receiver) = ends();
        assert!(!sender.takes_waking());
        assert_eq!(receiver.prepare_sleep(), Ok(false));
        assert_eq!(sender.write(&[1]), Ok(1));
        assert!(sender.takes_waking());
        assert!(!sender.takes_waking());
        assert_eq!(receiver.prepare_sleep(), Ok(true));
        receiver.end_sleep();
        assert!(!sender.takes_waking());
        assert_eq!(receiver.read(&mut [0; 2]), Ok(1));
    }

    #[test]
    fn counters_that_cannot_be_are_refused() {
        let (mut sender, mut receiver) = ends();
        sender.place.state().read.0.store(1, Ordering::Relaxed);
        assert_eq!(sender.write(&[1]), Err(Corrupt));
        sender.place.state().written.0.store(CAPACITY as u64 + 1, Ordering::Relaxed);
        assert_eq!(receiver.read(&mut [0; 1]), Err(Corrupt));
        assert_eq!(receiver.prepare_sleep(), Err(Corrupt));
    }
}
