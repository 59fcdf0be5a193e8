use super::mapping::Mapping;
use crate::buffer::CacheLine;
use std::ops::Range;

/// The address of a vector, or of a part of it, in memory of some rank. Ranges are bytes of the full vector.
#[derive(Clone, Copy)]
pub(super) struct View {
    /// Address of the full vector's first byte, whether or not that byte is in the part.
    start: *mut u8,
    /// The range of the part that is in memory.
    first: usize,
    end: usize,
}

// SAFETY: a view is only an address. The protocol of the parent module says when it may be used.
unsafe impl Send for View {}

impl View {
    /// A view of the bytes `part` of a vector, stored at `offset` of an arena. `None` if it is outside of the arena or misaligned for the
    /// elements.
    pub(super) fn new(
        memory: &Mapping,
        offset: usize,
        element_bytes: usize,
        part: Range<usize>,
    ) -> Option<Self> {
        let is_inside = offset.is_multiple_of(element_bytes)
            && offset.checked_add(part.len()).is_some_and(|end| end <= memory.len());
        is_inside.then(|| View::at(memory.at(offset, part.len()), part))
    }

    /// A view of the bytes `part` of a vector, stored at `start`.
    pub(super) fn at(start: *mut u8, part: Range<usize>) -> Self {
        View { start: start.wrapping_sub(part.start), first: part.start, end: part.end }
    }

    /// The address of a range of bytes.
    ///
    /// # Panics
    /// If the range is not inside the part.
    pub(super) fn bytes(&self, range: &Range<usize>) -> *mut u8 {
        assert!(
            self.first <= range.start && range.start <= range.end && range.end <= self.end,
            "bytes {range:?} are among {}..{}",
            self.first,
            self.end
        );
        self.start.wrapping_add(range.start)
    }

    /// Prefetches bytes, all at once. Loaded one by one, each line would wait for the previous one to arrive from another core's cache.
    ///
    /// # Panics
    /// As [`bytes`](View::bytes).
    pub(super) fn prefetch(&self, range: &Range<usize>) {
        let first = self.bytes(range).cast_const();
        let to_line = first.addr() % size_of::<CacheLine>();
        for offset in (0..to_line + range.len()).step_by(size_of::<CacheLine>()) {
            prefetch_line(first.wrapping_sub(to_line).wrapping_add(offset));
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn prefetch_line(at: *const u8) {
    use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: every x86-64 has the instruction, which reads nothing as far as the program can tell.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
}

#[cfg(not(target_arch = "x86_64"))]
fn prefetch_line(_: *const u8) {}
