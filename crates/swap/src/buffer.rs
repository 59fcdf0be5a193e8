use crate::raw::{LentMemory, Memory};
use crate::{ALIGNMENT, SwapError};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard};
use trireme_base::{Bytes, HUGE_PAGE_BYTES};

/// Memory that a transfer can take: it begins at a multiple of [`ALIGNMENT`].
///
/// Dropping it gives the memory back to its file, for the next buffer of that capacity.
pub struct AlignedBuffer {
    /// Present until it is dropped or lent.
    memory: Option<Memory>,
    len: usize,
    pool: Arc<Pool>,
}

impl AlignedBuffer {
    /// The capacity of a buffer for `len` bytes. A length that cannot be rounded up is more memory than any system gives.
    pub fn capacity_for(len: usize) -> usize {
        let unit = if len < HUGE_PAGE_BYTES / 2 { ALIGNMENT } else { HUGE_PAGE_BYTES };
        len.max(1).checked_next_multiple_of(unit).unwrap_or(usize::MAX)
    }

    /// How many bytes it can hold: a multiple of [`ALIGNMENT`], and from 1 MiB on of huge pages of 2 MiB.
    pub fn capacity(&self) -> usize {
        self.memory().len()
    }

    /// Sets the length. What was written before at higher positions is seen again.
    ///
    /// # Panics
    /// If `len` is more than the capacity.
    pub fn set_len(&mut self, len: usize) {
        assert!(len <= self.capacity(), "{len} bytes in a buffer for {}", self.capacity());
        self.len = len;
    }

    /// Prepares the buffer for a transfer of all its bytes, rounded up to [`ALIGNMENT`].
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

/// A buffer that a transfer cuts into parts.
pub(crate) struct LentBuffer {
    pub(crate) memory: LentMemory,
    len: usize,
    pool: Arc<Pool>,
}

impl LentBuffer {
    /// The buffer, if no part of it is left.
    pub(crate) fn reclaim(self) -> Option<AlignedBuffer> {
        let LentBuffer { memory, len, pool } = self;
        Some(AlignedBuffer { memory: Some(memory.reclaim()?), len, pool })
    }
}

/// The memory of a file's buffers, used again by capacity.
#[derive(Debug, Default)]
pub(crate) struct Pool(Mutex<Shelf>);

#[derive(Debug, Default)]
struct Shelf {
    free: Vec<Memory>,
    /// How many memories there are, those that are out included; none is given up before the pool is.
    num_memories: usize,
    /// The sum of their lengths.
    bytes: u64,
}

impl Pool {
    /// A buffer of `len` bytes, with unspecified content.
    pub(crate) fn take(self: &Arc<Self>, len: usize) -> Result<AlignedBuffer, SwapError> {
        let capacity = AlignedBuffer::capacity_for(len);
        let mut shelf = self.lock();
        let memory = match shelf.free.iter().position(|memory| memory.len() == capacity) {
            Some(position) => shelf.free.swap_remove(position),
            None => shelf.map(capacity)?,
        };
        Ok(AlignedBuffer { memory: Some(memory), len, pool: Arc::clone(self) })
    }

    /// How many bytes all buffers have, those in use and those that wait.
    pub(crate) fn bytes(&self) -> u64 {
        self.lock().bytes
    }

    fn lock(&self) -> MutexGuard<'_, Shelf> {
        self.0.lock().expect("no thread panics while it holds the shelf")
    }
}

impl Shelf {
    fn map(&mut self, capacity: usize) -> Result<Memory, SwapError> {
        let memory = Memory::new(capacity).map_err(|source| SwapError::Memory {
            bytes: Bytes(capacity as u64),
            source: Arc::new(source),
        })?;
        self.num_memories += 1;
        self.bytes += capacity as u64;
        // Room for all that is out: to take it back never allocates.
        self.free.reserve(self.num_memories - self.free.len());
        Ok(memory)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_used_again_by_capacity() {
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
    fn what_no_memory_can_hold_is_an_error() {
        let pool = Arc::new(Pool::default());
        assert!(matches!(pool.take(usize::MAX), Err(SwapError::Memory { .. })));
        assert!(matches!(pool.take(usize::MAX - (3 << 20)), Err(SwapError::Memory { .. })));
        assert!(matches!(pool.take(1 << 60), Err(SwapError::Memory { .. })));
    }
}
