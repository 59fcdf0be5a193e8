use memmap2::{MmapMut, MmapRaw};
use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::slice;
use std::sync::Arc;
use trireme_base::HUGE_PAGE_BYTES;

/// Page-aligned memory with a single owner, zeroed at creation.
#[derive(Debug)]
pub(crate) struct Memory {
    /// The only handle to the mapping.
    mapping: Arc<MmapRaw>,
    range: Range<usize>,
}

impl Memory {
    /// Maps `bytes` of memory. Pages are allocated on first access. They are huge pages if `bytes` is a multiple of [`HUGE_PAGE_BYTES`].
    ///
    /// The kernel pins every page of a transfer and passes each page's address to the device. With huge pages, disks reach two to three
    /// times the bandwidth.
    pub(crate) fn new(bytes: usize) -> io::Result<Self> {
        if !bytes.is_multiple_of(HUGE_PAGE_BYTES) {
            let mapping = MmapMut::map_anon(bytes)?;
            return Ok(Memory { mapping: Arc::new(MmapRaw::from(mapping)), range: 0..bytes });
        }
        // The extra addresses let the range start at the boundary of a huge page. Addresses before and after the range are never accessed.
        let mapping = MmapMut::map_anon(bytes.saturating_add(HUGE_PAGE_BYTES))?;
        let begin = mapping.as_ptr().align_offset(HUGE_PAGE_BYTES);
        // A kernel without huge pages ignores the advice and uses small ones.
        let _ = mapping.advise(memmap2::Advice::HugePage);
        Ok(Memory { mapping: Arc::new(MmapRaw::from(mapping)), range: begin..begin + bytes })
    }

    /// Lends the first `bytes`, which can then be split into parts.
    pub(crate) fn lend(self, bytes: usize) -> LentMemory {
        let Range { start, end } = self.range;
        assert!(bytes <= end - start, "more is lent than there is");
        LentMemory { mapping: self.mapping, whole: start..end, remaining: start..start + bytes }
    }
}

impl Deref for Memory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the range lies within the mapping, which is readable. `mapping` is the only handle to the mapping, so nothing writes to
        // it while `self` is borrowed.
        unsafe { slice::from_raw_parts(self.mapping.as_ptr().add(self.range.start), self.range.len()) }
    }
}

impl DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `self` is borrowed mutably, so no other borrow exists.
        unsafe {
            slice::from_raw_parts_mut(self.mapping.as_mut_ptr().add(self.range.start), self.range.len())
        }
    }
}

/// Memory that is lent to a transfer and split into parts. It cannot be accessed until all parts are dropped.
#[derive(Debug)]
pub(crate) struct LentMemory {
    mapping: Arc<MmapRaw>,
    whole: Range<usize>,
    /// The range of the lent bytes that no part covers yet.
    remaining: Range<usize>,
}

impl LentMemory {
    /// Returns the next part of at most `bytes`, or `None` if all lent bytes belong to parts.
    pub(crate) fn split_off(&mut self, bytes: usize) -> Option<MemoryPart> {
        let Range { start, end } = self.remaining;
        let middle = end.min(start.saturating_add(bytes));
        self.remaining = middle..end;
        (start < middle).then(|| MemoryPart { mapping: Arc::clone(&self.mapping), range: start..middle })
    }

    /// Returns whether all lent bytes belong to parts.
    pub(crate) fn is_fully_split(&self) -> bool {
        self.remaining.is_empty()
    }

    /// Returns the memory, or `None` if a part still exists.
    pub(crate) fn reclaim(mut self) -> Option<Memory> {
        // A successful `get_mut` happens after the drop of every part, so all writes to parts are visible.
        Arc::get_mut(&mut self.mapping)?;
        Some(Memory { mapping: self.mapping, range: self.whole })
    }
}

/// A piece of lent memory with a single owner. Each part keeps the mapping alive.
#[derive(Debug)]
pub(crate) struct MemoryPart {
    mapping: Arc<MmapRaw>,
    range: Range<usize>,
}

impl MemoryPart {
    pub(super) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.mapping.as_mut_ptr().wrapping_add(self.range.start)
    }
}

impl Deref for MemoryPart {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the range lies within the mapping. `LentMemory::split_off` gives each byte to only one part, and neither the `LentMemory`
        // nor the `Memory` that is reclaimed from it gives access before all parts are dropped. So nothing writes to the range while `self`
        // is borrowed.
        unsafe { slice::from_raw_parts(self.mapping.as_ptr().add(self.range.start), self.range.len()) }
    }
}

impl DerefMut for MemoryPart {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `self` is borrowed mutably, so no other borrow exists.
        unsafe {
            slice::from_raw_parts_mut(self.mapping.as_mut_ptr().add(self.range.start), self.range.len())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_disjoint_and_cover_what_was_lent() {
        let mut lent = Memory::new(3 * 4096).expect("memory").lend(2 * 4096 + 100);
        let mut parts: Vec<MemoryPart> = std::iter::from_fn(|| lent.split_off(4096)).collect();
        assert_eq!(parts.iter().map(|part| part.len()).collect::<Vec<_>>(), [4096, 4096, 100]);
        parts.iter_mut().zip(1..).for_each(|(part, value)| part.fill(value));
        drop(parts);
        assert!(lent.is_fully_split());
        let memory = lent.reclaim().expect("no part is left");
        let expected = [vec![1; 4096], vec![2; 4096], vec![3; 100], vec![0; 3996]].concat();
        assert_eq!(*memory, expected);
    }

    #[test]
    fn long_memory_is_aligned_to_huge_pages() {
        let mut memory = Memory::new(2 * HUGE_PAGE_BYTES).expect("memory");
        assert_eq!((memory.len(), memory.as_ptr().align_offset(HUGE_PAGE_BYTES)), (2 * HUGE_PAGE_BYTES, 0));
        memory.fill(1);
        let mut lent = memory.lend(HUGE_PAGE_BYTES);
        lent.split_off(HUGE_PAGE_BYTES).expect("a part").fill(2);
        let memory = lent.reclaim().expect("no part is left");
        assert!(memory[..HUGE_PAGE_BYTES].iter().all(|byte| *byte == 2));
        assert!(memory[HUGE_PAGE_BYTES..].iter().all(|byte| *byte == 1));
    }

    #[test]
    fn memory_stays_lent_while_a_part_lives() {
        let mut lent = Memory::new(4096).expect("memory").lend(4096);
        let mut part = lent.split_off(4096).expect("a part");
        assert!(lent.reclaim().is_none());
        // The part keeps the mapping alive.
        part.fill(7);
        assert!(part.iter().all(|byte| *byte == 7));
    }
}
