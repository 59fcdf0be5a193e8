use super::mapping::Mapping;
use super::ring::State;
use std::sync::Arc;

/// Bytes of one ring in its sender's arena.
pub(super) const RING_BYTES: usize = size_of::<State>() + RingMemory::CAPACITY;

/// A ring's memory in an arena: its state, followed by its bytes.
pub(crate) struct RingMemory {
    mapping: Arc<Mapping>,
    offset: usize,
}

impl RingMemory {
    /// Capacity of a ring in bytes. A multiple of every element size, so that no element of an aligned message is split.
    pub(super) const CAPACITY: usize = 256 << 10;

    /// Creates a handle to the ring at `offset`.
    ///
    /// # Panics
    /// If the ring is not inside the memory, or its offset is not a multiple of 128 bytes.
    pub(super) fn new(memory: Arc<Mapping>, offset: usize) -> Self {
        memory.at(offset, RING_BYTES);
        assert!(offset.is_multiple_of(align_of::<State>()), "rings are at multiples of a line");
        RingMemory { mapping: memory, offset }
    }

    pub(super) fn state(&self) -> &State {
        let start = self.mapping.at(self.offset, size_of::<State>());
        // SAFETY: the state is inside the mapping, which `self` keeps, and aligned, as `new` has checked. It consists of atomics only, for
        // which any bits are valid.
        unsafe { &*start.cast::<State>() }
    }

    /// Copies `from` to the ring's bytes from index `first` on.
    ///
    /// # Safety
    /// No other thread or process may access these bytes at the same time.
    pub(super) unsafe fn write(&self, first: usize, from: &[u8]) {
        // SAFETY: the bytes are mapped, and by the caller's promise no other code accesses them. `from` is not part of a ring, because no
        // reference into a ring exists.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.bytes(first, from.len()), from.len()) };
    }

    /// Copies the ring's bytes from index `first` on to `to`.
    ///
    /// # Safety
    /// No other thread or process may write to these bytes at the same time.
    pub(super) unsafe fn read(&self, first: usize, to: &mut [u8]) {
        let from = self.bytes(first, to.len()).cast_const();
        // SAFETY: as for `write`.
        unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) };
    }

    fn bytes(&self, first: usize, len: usize) -> *mut u8 {
        self.mapping.at(self.offset + size_of::<State>() + first, len)
    }
}
