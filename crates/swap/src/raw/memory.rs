use memmap2::{MmapMut, MmapRaw};
use std::io;
use std::ops::{Deref, DerefMut, Range};
use std::slice;
use std::sync::Arc;

/// Memory that begins at a page, zero at first, and that nobody else sees.
#[derive(Debug)]
pub(crate) struct Memory {
    /// The only handle to the mapping.
    mapping: Arc<MmapRaw>,
}

impl Memory {
    /// Reserves `bytes`; pages come when they are touched.
    pub(crate) fn new(bytes: usize) -> io::Result<Self> {
        let mapping = MmapMut::map_anon(bytes)?;
        // The kernel pins a buffer page by page for each transfer: large pages make that, and the device's lists,
        // shorter. A kernel without them takes small ones.
        let _ = mapping.advise(memmap2::Advice::HugePage);
        Ok(Memory { mapping: Arc::new(MmapRaw::from(mapping)) })
    }

    /// Prepares the first `bytes` for being cut into parts.
    pub(crate) fn lend(self, bytes: usize) -> LentMemory {
        assert!(bytes <= self.len(), "more is lent than there is");
        LentMemory { mapping: self.mapping, begin: 0, end: bytes }
    }
}

impl Deref for Memory {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping is readable and as long as it says; `mapping` is the only handle to it, so nothing
        // writes while `self` is borrowed.
        unsafe { slice::from_raw_parts(self.mapping.as_ptr(), self.mapping.len()) }
    }
}

impl DerefMut for Memory {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed by nobody else.
        unsafe { slice::from_raw_parts_mut(self.mapping.as_mut_ptr(), self.mapping.len()) }
    }
}

/// Memory of which parts are, or were, in other hands. It cannot be accessed until all of them are gone.
#[derive(Debug)]
pub(crate) struct LentMemory {
    mapping: Arc<MmapRaw>,
    /// Where the next part begins.
    begin: usize,
    end: usize,
}

impl LentMemory {
    /// The next at most `bytes` that no part has had; none if all has been cut.
    pub(crate) fn cut(&mut self, bytes: usize) -> Option<Part> {
        let end = self.end.min(self.begin.saturating_add(bytes));
        let range = self.begin..end;
        self.begin = end;
        (!range.is_empty()).then(|| Part { mapping: Arc::clone(&self.mapping), range })
    }

    /// Whether all of it has been cut.
    pub(crate) fn is_cut_up(&self) -> bool {
        self.begin == self.end
    }

    /// The memory, if no part of it is left.
    pub(crate) fn reclaim(mut self) -> Option<Memory> {
        // `get_mut` sees all that the threads did with parts before they dropped them.
        Arc::get_mut(&mut self.mapping)?;
        Some(Memory { mapping: self.mapping })
    }
}

/// A piece of lent memory, with one owner. The mapping lives as long as any part of it.
#[derive(Debug)]
pub(crate) struct Part {
    mapping: Arc<MmapRaw>,
    range: Range<usize>,
}

impl Part {
    pub(super) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.mapping.as_mut_ptr().wrapping_add(self.range.start)
    }
}

impl Deref for Part {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `LentMemory::cut` gives each byte to one part only, within the mapping, and neither it nor the
        // `Memory` that comes after it is accessible before all parts are gone. So nothing writes here while
        // `self` is borrowed.
        unsafe { slice::from_raw_parts(self.mapping.as_ptr().add(self.range.start), self.range.len()) }
    }
}

impl DerefMut for Part {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed by nobody else.
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
        let mut parts: Vec<Part> = std::iter::from_fn(|| lent.cut(4096)).collect();
        assert_eq!(parts.iter().map(|part| part.len()).collect::<Vec<_>>(), [4096, 4096, 100]);
        parts.iter_mut().zip(1..).for_each(|(part, value)| part.fill(value));
        drop(parts);
        assert!(lent.is_cut_up());
        let memory = lent.reclaim().expect("no part is left");
        let expected = [vec![1; 4096], vec![2; 4096], vec![3; 100], vec![0; 3996]].concat();
        assert_eq!(*memory, expected);
    }

    #[test]
    fn memory_stays_lent_while_a_part_lives() {
        let mut lent = Memory::new(4096).expect("memory").lend(4096);
        let mut part = lent.cut(4096).expect("a part");
        assert!(lent.reclaim().is_none());
        // The mapping lives on with the part.
        part.fill(7);
        assert!(part.iter().all(|byte| *byte == 7));
    }
}
