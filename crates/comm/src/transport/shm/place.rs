use super::mapping::Mapping;
use super::ring::State;
use std::sync::Arc;

/// What one ring takes in its sender's arena.
pub(super) const RING_BYTES: usize = size_of::<State>() + Place::CAPACITY;

/// A ring's memory in an arena: its state, then its bytes.
pub(crate) struct Place {
    memory: Arc<Mapping>,
    offset: usize,
}

impl Place {
    /// Bytes that fit into a ring. A multiple of any element, so that no element of an aligned message is torn.
    pub(super) const CAPACITY: usize = 256 << 10;

    /// # Panics
    /// If the ring is not inside of the memory, or not at a multiple of a line.
    pub(super) fn new(memory: Arc<Mapping>, offset: usize) -> Self {
        memory.at(offset, RING_BYTES);
        assert!(offset.is_multiple_of(align_of::<State>()), "rings are at multiples of a line");
        Place { memory, offset }
    }

    pub(super) fn state(&self) -> &State {
        let start = self.memory.at(self.offset, size_of::<State>());
        // SAFETY: inside of the mapping, which `self` keeps, and aligned, as `new` has checked; a `State` is made of
        // atomics only, and any bits are one.
        unsafe { &*start.cast::<State>() }
    }

    /// Copies `from` into the ring's bytes from the `first`-th on.
    ///
    /// # Safety
    /// Nobody else touches these bytes meanwhile.
    pub(super) unsafe fn write(&self, first: usize, from: &[u8]) {
        // SAFETY: the bytes are mapped, and by the caller's promise nobody else's. `from` is no part of a ring: nobody
        // refers to one.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.bytes(first, from.len()), from.len()) };
    }

    /// Copies the ring's bytes from the `first`-th on to `to`.
    ///
    /// # Safety
    /// Nobody writes to these bytes meanwhile.
    pub(super) unsafe fn read(&self, first: usize, to: &mut [u8]) {
        let from = self.bytes(first, to.len()).cast_const();
        // SAFETY: as for `write`.
        unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), to.len()) };
    }

    fn bytes(&self, first: usize, len: usize) -> *mut u8 {
        self.memory.at(self.offset + size_of::<State>() + first, len)
    }
}
