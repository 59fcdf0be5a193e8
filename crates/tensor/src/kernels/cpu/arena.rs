//! Memory for tensors: one reserved range of addresses, cut into blocks.
//!
//! Pages are taken from the system when first touched, so the resident size of the process follows what is
//! counted. Freed blocks are merged with their neighbours and reused, best fit first: after the first step
//! every request finds its block, and nothing is allocated.

use crate::memory::{MemoryCounter, OverBudget, describe};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};
use trireme_base::{Bytes, Category};

/// Blocks begin at multiples of this: a cache line, and the widest SIMD register.
pub(crate) const ALIGNMENT: usize = 64;

/// The least that the system takes back; a multiple of its pages.
const PAGE: usize = 64 << 10;

/// A range of memory handed out in blocks.
#[derive(Debug)]
pub(crate) struct Arena {
    start: NonNull<u8>,
    reserved: usize,
    free: Mutex<FreeList>,
    counter: Arc<MemoryCounter>,
}

// SAFETY: the range is only reached through blocks, which do not overlap.
unsafe impl Send for Arena {}
// SAFETY: as above; the free list is behind a lock.
unsafe impl Sync for Arena {}

/// No block of the size asked for.
#[derive(Debug, Clone, thiserror::Error)]
pub(crate) enum OutOfMemory {
    /// It is more than the machine has.
    #[error(
        "out of memory: {requested} for {category} do not fit into the {reserved} of this device ({in_use}); use \
         a smaller local_batch_size or seq_len, or a machine with more memory"
    )]
    Machine { requested: Bytes, category: Category, reserved: Bytes, in_use: String },
    /// It is more than the budget.
    #[error(transparent)]
    Budget(#[from] OverBudget),
}

impl Arena {
    /// Reserves addresses for as much memory as the machine has; takes none of it.
    pub(crate) fn reserve(counter: Arc<MemoryCounter>) -> std::io::Result<Self> {
        let system = rustix::system::sysinfo();
        let num_bytes = system.totalram as usize * system.mem_unit.max(1) as usize;
        Self::reserve_bytes(num_bytes.max(1 << 30), counter)
    }

    /// Reserves `num_bytes` of addresses, or as many as the system gives.
    pub(crate) fn reserve_bytes(num_bytes: usize, counter: Arc<MemoryCounter>) -> std::io::Result<Self> {
        let mut reserved = num_bytes;
        loop {
            // SAFETY: a fresh anonymous mapping at an address of the system's choice.
            let mapping = unsafe {
                mmap_anonymous(
                    std::ptr::null_mut(),
                    reserved,
                    ProtFlags::READ | ProtFlags::WRITE,
                    MapFlags::PRIVATE | MapFlags::NORESERVE,
                )
            };
            match mapping {
                Ok(start) => {
                    // Fewer TLB misses; a system without huge pages may refuse, at no loss but speed.
                    // SAFETY: the range has just been mapped.
                    let _ = unsafe { madvise(start, reserved, Advice::LinuxHugepage) };
                    let start = NonNull::new(start.cast()).expect("the system maps nothing at address 0");
                    return Ok(Arena { start, reserved, free: Mutex::new(FreeList::new(reserved)), counter });
                }
                // Systems that refuse overcommitted memory may still give less.
                Err(_) if reserved > 1 << 28 => reserved /= 2,
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Refuses early what can never fit.
    pub(crate) fn check_room(&self, len: usize, category: Category) -> Result<(), OutOfMemory> {
        if len <= self.reserved { Ok(()) } else { Err(self.out_of_memory(len, category)) }
    }

    fn out_of_memory(&self, len: usize, category: Category) -> OutOfMemory {
        OutOfMemory::Machine {
            requested: Bytes(len as u64),
            category,
            reserved: Bytes(self.reserved as u64),
            in_use: describe(&self.counter.in_use()),
        }
    }

    /// Gives the pages of free memory back to the system.
    pub(crate) fn trim(&self) {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        for span in &free.spans {
            let (start, end) = (span.offset.next_multiple_of(PAGE), (span.offset + span.len) / PAGE * PAGE);
            if start < end {
                // SAFETY: pages within the mapping of which no block has a part: nobody reads them before writing them anew.
                // A system that refuses keeps them.
                let _ = unsafe {
                    madvise(self.start.as_ptr().add(start).cast(), end - start, Advice::LinuxDontNeed)
                };
            }
        }
    }

    /// Takes a block of `len` bytes, with whatever its last user left in it.
    pub(crate) fn take(self: &Arc<Self>, len: usize, category: Category) -> Result<Block, OutOfMemory> {
        let offset = Some(self.take_offset(len, category)?);
        Ok(Block { arena: Arc::clone(self), offset, len, category })
    }

    fn take_offset(&self, len: usize, category: Category) -> Result<usize, OutOfMemory> {
        // No length that is asked for may overflow on its way to being refused.
        self.check_room(len, category)?;
        let padded = len.next_multiple_of(ALIGNMENT);
        self.counter.take(category, padded)?;
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(offset) = free.take(padded) else {
            self.counter.give(category, padded);
            return Err(self.out_of_memory(len, category));
        };
        Ok(offset)
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: mapped in `reserve` with this length; no block is left, for each holds the arena.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.reserved) };
    }
}

/// Bytes of an arena that belong to one owner; given back when dropped.
#[derive(Debug)]
pub(crate) struct Block {
    arena: Arc<Arena>,
    /// Absent while the memory is given back.
    offset: Option<usize>,
    len: usize,
    category: Category,
}

impl Block {
    /// Number of bytes, whether they are here or not.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Gives the memory back, and with it what it holds.
    pub(crate) fn release(&mut self) {
        let Some(offset) = self.offset.take() else { return };
        let padded = self.len.next_multiple_of(ALIGNMENT);
        self.arena.counter.give(self.category, padded);
        self.arena.free.lock().unwrap_or_else(PoisonError::into_inner).give(offset, padded);
    }

    /// Takes memory again, with whatever its last user left in it.
    pub(crate) fn retake(&mut self) -> Result<(), OutOfMemory> {
        if self.offset.is_none() {
            self.offset = Some(self.arena.take_offset(self.len, self.category)?);
        }
        Ok(())
    }

    fn offset(&self) -> usize {
        self.offset.expect("memory is here when it is worked with")
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: within the mapping, initialised (anonymous pages begin as zeros), and no other block
        // overlaps.
        unsafe { std::slice::from_raw_parts(self.arena.start.as_ptr().add(self.offset()), self.len) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and the borrow of `self` is unique.
        unsafe { std::slice::from_raw_parts_mut(self.arena.start.as_ptr().add(self.offset()), self.len) }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.release();
    }
}

/// The gaps between blocks, in address order, never adjacent.
#[derive(Debug)]
struct FreeList {
    spans: Vec<Span>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Span {
    offset: usize,
    len: usize,
}

impl FreeList {
    fn new(len: usize) -> Self {
        // Room for far more gaps than a step makes, so that steady-state steps do not grow it.
        let mut spans = Vec::with_capacity(4096);
        spans.push(Span { offset: 0, len });
        FreeList { spans }
    }

    /// Best fit: the smallest gap that is large enough, the lowest of equals.
    fn take(&mut self, len: usize) -> Option<usize> {
        let fitting = self.spans.iter().enumerate().filter(|(_, span)| span.len >= len);
        let (index, _) = fitting.min_by_key(|(_, span)| span.len)?;
        let span = &mut self.spans[index];
        let offset = span.offset;
        span.offset += len;
        span.len -= len;
        if span.len == 0 {
            self.spans.remove(index);
        }
        Some(offset)
    }

    fn give(&mut self, offset: usize, len: usize) {
        if len == 0 {
            return;
        }
        let next = self.spans.partition_point(|span| span.offset < offset);
        let touches_next = self.spans.get(next).is_some_and(|span| span.offset == offset + len);
        let previous = next.checked_sub(1).filter(|&index| {
            let span = self.spans[index];
            span.offset + span.len == offset
        });
        match (previous, touches_next) {
            (Some(previous), true) => {
                self.spans[previous].len += len + self.spans[next].len;
                self.spans.remove(next);
            }
            (Some(previous), false) => self.spans[previous].len += len,
            (None, true) => {
                self.spans[next].offset = offset;
                self.spans[next].len += len;
            }
            (None, false) => self.spans.insert(next, Span { offset, len }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn blocks_are_counted_reused_and_apart() {
        let counter = Arc::new(MemoryCounter::new(None));
        let arena = Arc::new(Arena::reserve(Arc::clone(&counter)).unwrap());
        let mut first = arena.take(100, Category::Parameters).unwrap();
        let mut second = arena.take(1, Category::Activations).unwrap();
        first.bytes_mut().fill(1);
        second.bytes_mut().fill(2);
        assert!(first.bytes().iter().all(|&byte| byte == 1));
        assert_eq!(counter.usage(Category::Parameters).current, 128);
        let address = first.bytes().as_ptr();
        drop(first);
        assert_eq!(counter.usage(Category::Parameters).current, 0);
        assert_eq!(arena.take(128, Category::Gradients).unwrap().bytes().as_ptr(), address);
        assert!(arena.take(usize::MAX / 2, Category::Gradients).is_err());
        assert_eq!(second.bytes(), [2]);
    }

    #[test]
    fn trimming_takes_nothing_from_blocks() {
        let arena = Arc::new(Arena::reserve(Arc::new(MemoryCounter::new(None))).unwrap());
        let mut blocks: Vec<Block> =
            (0..4).map(|_| arena.take(3 * PAGE + 64, Category::Optimizer).unwrap()).collect();
        blocks.iter_mut().for_each(|block| block.bytes_mut().fill(7));
        blocks[1].release();
        blocks.swap_remove(2);
        arena.trim();
        assert!(blocks[0].bytes().iter().chain(blocks[2].bytes()).all(|&byte| byte == 7));
        blocks[1].retake().unwrap();
        assert!(blocks[1].bytes()[PAGE..2 * PAGE].iter().all(|&byte| byte == 0), "its pages were given back");
    }

    proptest! {
        #[test]
        fn no_two_blocks_overlap_and_all_gaps_merge(
            requests in proptest::collection::vec((1_usize..50, any::<proptest::sample::Index>()), 1..60)
        ) {
            let mut list = FreeList::new(4096);
            let mut taken: Vec<Span> = Vec::new();
            for (len, index) in requests {
                let offset = list.take(len).unwrap();
                prop_assert!(taken.iter().all(|span| offset + len <= span.offset || span.offset + span.len <= offset));
                taken.push(Span { offset, len });
                if len % 3 == 0 {
                    let span = taken.swap_remove(index.index(taken.len()));
                    list.give(span.offset, span.len);
                }
            }
            for span in taken {
                list.give(span.offset, span.len);
            }
            prop_assert_eq!(list.spans, vec![Span { offset: 0, len: 4096 }]);
        }
    }
}
