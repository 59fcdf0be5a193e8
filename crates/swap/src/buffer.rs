//! Buffers of transfers.
//!
//! Long buffers are aligned to huge pages. The kernel pins one huge page instead of 512 small pages, which made direct IO two to three
//! times as fast.

use crate::raw::{LentMemory, Memory};
use crate::{ALIGNMENT, SwapError};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard};
use trireme_base::{Bytes, HUGE_PAGE_BYTES};

/// A buffer for transfers, aligned to [`ALIGNMENT`].
///
/// Dropping the buffer returns its memory to the pool of its file, which reuses it for the next buffer of the same capacity.
pub struct AlignedBuffer {
    /// `None` once the memory has been lent or returned to the pool.
    memory: Option<Memory>,
    len: usize,
    pool: Arc<Pool>,
}

impl AlignedBuffer {
    /// Returns the capacity in bytes of a buffer for `len` bytes. A `len` that cannot be rounded up yields `usize::MAX`, which no system
    /// can allocate.
    pub fn capacity_for(len: usize) -> usize {
        let unit = if len < HUGE_PAGE_BYTES / 2 { ALIGNMENT } else { HUGE_PAGE_BYTES };
        len.max(1).checked_next_multiple_of(unit).unwrap_or(usize::MAX)
    }

    /// Returns the capacity in bytes. It is a multiple of [`ALIGNMENT`]. For a length of 1 MiB or more, it is a multiple of huge pages (2
    /// MiB).
    pub fn capacity(&self) -> usize {
        self.memory().len()
    }

    /// Sets the length in bytes. A longer buffer exposes the bytes that were written there before.
    ///
    /// # Panics
    /// If `len` is more than the capacity.
    pub fn set_len(&mut self, len: usize) {
        assert!(len <= self.capacity(), "{len} bytes in a buffer for {}", self.capacity());
        self.len = len;
    }

    /// Lends the buffer to a transfer of all its bytes, rounded up to [`ALIGNMENT`].
    pub(crate) fn lend(mut self) -> LentBuffer {
        let memory = self.memory.take().expect("the memory is here until now");
        let pool = Arc::clone(&self.pool);
        LentBuffer { memory: memory.lend(self.len.next_multiple_of(ALIGNMENT)), len: self.len, pool }
    }

    fn memory(&self) -> &Memory {
        self.memory.as_ref().expect("the memory is here until the drop")
    }
}

impl Deref for AlignedBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory()[..self.len]
    }
}

impl DerefMut for AlignedBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        let memory = self.memory.as_mut().expect("the memory is here until the drop");
        &mut memory[..self.len]
    }
}

impl fmt::Debug for AlignedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AlignedBuffer").field("len", &self.len).finish_non_exhaustive()
    }
}

impl Drop for AlignedBuffer {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.pool.lock().free.push(memory);
        }
    }
}

/// A buffer that a transfer splits into parts.
pub(crate) struct LentBuffer {
    pub(crate) memory: LentMemory,
    len: usize,
    pool: Arc<Pool>,
}

impl LentBuffer {
    /// Returns the buffer, or `None` if a part of it still exists.
    pub(crate) fn reclaim(self) -> Option<AlignedBuffer> {
        let LentBuffer { memory, len, pool } = self;
        Some(AlignedBuffer { memory: Some(memory.reclaim()?), len, pool })
    }
}

/// The memory of all buffers of a swap file. Free memory is reused for buffers of the same capacity.
#[derive(Debug, Default)]
pub(crate) struct Pool(Mutex<PoolState>);

#[derive(Debug, Default)]
struct PoolState {
    free: Vec<Memory>,
    /// Number of allocations, free or in use. Memory is freed only with the pool.
    num_allocations: usize,
    /// Total size of all allocations.
    bytes: u64,
}

impl Pool {
    /// Returns a buffer of `len` bytes with unspecified content.
    pub(crate) fn take(self: &Arc<Self>, len: usize) -> Result<AlignedBuffer, SwapError> {
        let capacity = AlignedBuffer::capacity_for(len);
        let mut state = self.lock();
        let memory = match state.free.iter().position(|memory| memory.len() == capacity) {
            Some(position) => state.free.swap_remove(position),
            None => state.map(capacity)?,
        };
        Ok(AlignedBuffer { memory: Some(memory), len, pool: Arc::clone(self) })
    }

    /// Returns the total capacity of all buffers in bytes, free or in use.
    pub(crate) fn bytes(&self) -> u64 {
        self.lock().bytes
    }

    fn lock(&self) -> MutexGuard<'_, PoolState> {
        self.0.lock().expect("no thread panics while it holds the shelf")
    }
}

impl PoolState {
    fn map(&mut self, capacity: usize) -> Result<Memory, SwapError> {
        let memory = Memory::new(capacity).map_err(|source| SwapError::Memory {
            bytes: Bytes(capacity as u64),
            source: Arc::new(source),
        })?;
        self.num_allocations += 1;
        self.bytes += capacity as u64;
        // Reserve space for every allocation, so that returning a buffer never allocates.
        self.free.reserve(self.num_allocations - self.free.len());
        Ok(memory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_reused_by_capacity() {
        let pool = Arc::new(Pool::default());
        let buffer = pool.take(5000).expect("memory");
        assert_eq!((buffer.len(), buffer.capacity()), (5000, 8192));
        assert_eq!(buffer.as_ptr().align_offset(ALIGNMENT), 0);
        let address = buffer.as_ptr();
        drop(buffer);
        let larger = pool.take(8193).expect("memory");
        let again = pool.take(8192).expect("memory");
        assert_eq!(again.as_ptr(), address);
        assert_eq!(pool.bytes(), 8192 + 12288);
        let huge = pool.take(5 << 20).expect("memory");
        assert_eq!((huge.len(), huge.capacity()), (5 << 20, 6 << 20));
        drop((larger, again, huge));
    }

    #[test]
    fn lengths_beyond_memory_are_errors() {
        let pool = Arc::new(Pool::default());
        assert!(matches!(pool.take(usize::MAX), Err(SwapError::Memory { .. })));
        assert!(matches!(pool.take(usize::MAX - (3 << 20)), Err(SwapError::Memory { .. })));
        assert!(matches!(pool.take(1 << 60), Err(SwapError::Memory { .. })));
    }
}
