//! Memory for tensors: one reserved range of addresses, cut into blocks.
//!
//! Pages are taken from the system when first touched, so the resident size of the process follows what is
//! counted. Freed blocks are merged with their neighbours and reused, best fit first: after the first step
//! every request finds its block, and nothing is allocated.

use crate::device::{DeviceError, Result};
use crate::kernels::backend::Backend;
use crate::kernels::cpu::free_list::FreeList;
use crate::kernels::cpu::mapping::Mapping;
use crate::kernels::{Operand, OperandMut};
use crate::lent_memory::{LentMemory, Overflow};
use crate::memory::{MemoryCounter, PageSource, describe};
use crate::shape::Shape;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use trireme_base::{Bytes, Category, DType};

/// Blocks begin at multiples of this: a cache line, and the widest SIMD register.
pub(crate) const ALIGNMENT: usize = 64;

/// A range of memory handed out in blocks.
#[derive(Debug)]
pub(crate) struct Arena {
    memory: Arc<Mapping>,
    blocks: Mutex<Blocks>,
    counter: Arc<MemoryCounter>,
    /// The backend whose kernels and copies may still work with memory that was given back.
    backend: OnceLock<Arc<dyn Backend>>,
    /// With the bytes of the budget that activations leave free.
    overflow: OnceLock<(Arc<dyn Overflow>, usize)>,
}

/// Which bytes of an arena belong to no block, and which a block may lie in.
#[derive(Debug)]
struct Blocks {
    free: FreeList,
    /// Bytes from the start on that may be read and written. Those after them are addresses and nothing else, for which
    /// no system asks whether it has the memory.
    accessible: usize,
}

impl Arena {
    /// Hands out as much memory as the machine has, or as many addresses as the process may have; takes none of it.
    pub(crate) fn reserve(page_source: PageSource, counter: Arc<MemoryCounter>) -> std::io::Result<Self> {
        Ok(Self::new(Mapping::reserve(page_source)?, 0, counter))
    }

    /// As [`reserve`](Arena::reserve), of memory that kernels find elsewhere, and that the host can neither read nor write. It is handed
    /// out in the order of a backend's work, once it has [one](Arena::order_by).
    pub(crate) fn detached(counter: Arc<MemoryCounter>) -> std::io::Result<Self> {
        Ok(Self::accessible(Mapping::detached()?, counter))
    }

    /// An arena of a device that only counts, whose blocks may be larger than the machine's memory.
    pub(crate) fn counting(counter: Arc<MemoryCounter>) -> std::io::Result<Self> {
        Ok(Self::accessible(Mapping::counting()?, counter))
    }

    fn accessible(memory: Mapping, counter: Arc<MemoryCounter>) -> Self {
        let num_bytes = memory.num_bytes();
        Self::new(memory, num_bytes, counter)
    }

    fn new(memory: Mapping, accessible: usize, counter: Arc<MemoryCounter>) -> Self {
        let blocks = Mutex::new(Blocks { free: FreeList::new(memory.num_bytes()), accessible });
        let (memory, backend, overflow) = (Arc::new(memory), OnceLock::new(), OnceLock::new());
        Arena { memory, blocks, counter, backend, overflow }
    }

    /// Hands memory out in the order of this backend's work from now on.
    pub(crate) fn order_by(&self, backend: &Arc<dyn Backend>) {
        self.backend.get_or_init(|| Arc::clone(backend));
    }

    /// Sets where activations go that the budget has no room for beside `reserved` bytes.
    pub(crate) fn overflow_to(&self, overflow: Arc<dyn Overflow>, reserved: usize) {
        self.overflow.get_or_init(|| (overflow, reserved));
    }

    /// Whether `len` more bytes of activations would take memory that is reserved for other categories.
    pub(crate) fn is_overflowing(&self, len: usize, category: Category) -> bool {
        let Some((_, reserved)) = self.overflow.get().filter(|_| category == Category::Activations) else {
            return false;
        };
        let padded = len.checked_next_multiple_of(ALIGNMENT).unwrap_or(usize::MAX);
        let needed = self.counter.usage(category).current.saturating_add(padded);
        self.counter.budget().is_some_and(|budget| needed > budget.saturating_sub(*reserved))
    }

    /// Memory elsewhere for activations, if there is any.
    pub(crate) fn overflow(&self, len: usize, category: Category) -> Option<Box<dyn LentMemory>> {
        let overflow = self.overflow.get().filter(|_| category == Category::Activations);
        overflow.and_then(|(overflow, _)| overflow.take(len))
    }

    pub(crate) fn page_source(&self) -> PageSource {
        self.memory.page_source()
    }

    pub(crate) fn mapping(&self) -> &Arc<Mapping> {
        &self.memory
    }

    /// Refuses early what can never fit.
    pub(crate) fn check_room(&self, len: usize, category: Category) -> Result<()> {
        if len <= self.memory.num_bytes() { Ok(()) } else { Err(self.out_of_memory(len, category)) }
    }

    /// More is asked for than the machine has.
    fn out_of_memory(&self, len: usize, category: Category) -> DeviceError {
        let [requested, reserved] = [len, self.memory.num_bytes()].map(|bytes| Bytes(bytes as u64));
        let in_use = describe(&self.counter.in_use());
        DeviceError::OutOfMemory(format!(
            "out of memory: {requested} for {category} do not fit into the {reserved} of this device ({in_use}); use \
             smaller batches, shorter sequences, or a machine with more memory"
        ))
    }

    /// The system gives no more memory to this process, or the host's pool of huge pages is used up, the control group may have no more of it, or
    /// the system is too old to say so.
    fn refused(&self, len: usize, category: Category, source: rustix::io::Errno) -> DeviceError {
        let (requested, in_use) = (Bytes(len as u64), describe(&self.counter.in_use()));
        let source = std::io::Error::from(source);
        match self.memory.page_source() {
            PageSource::Transparent => DeviceError::OutOfMemory(format!(
                "out of memory: the system refuses {requested} for {category} ({in_use}): {source}; if the machine has as much, see whether \
                 `ulimit -d`, `ulimit -v` or the setting vm.overcommit_memory = 2 keeps it back"
            )),
            PageSource::Reserved => DeviceError::HugePages(format!(
                "out of memory: the pool of huge pages has too few left for {requested} of {category} ({in_use}): {source}; reserve more of them \
                 (vm.nr_hugepages), or use transparent huge pages, which are all that Linux before 5.14 supports"
            )),
        }
    }

    /// Gives the pages of free memory back to the system.
    pub(crate) fn trim(&self) {
        // Kernels that have not run may still read what was given back.
        if self.memory.is_detached() {
            return;
        }
        let blocks = self.blocks();
        for span in &blocks.free.spans {
            let end = (span.offset + span.len).min(blocks.accessible);
            // SAFETY: no block has a part of them.
            unsafe { self.memory.discard(span.offset..end) };
        }
    }

    /// Takes a block of `len` bytes, with whatever its last user left in it.
    pub(crate) fn take(self: &Arc<Self>, len: usize, category: Category) -> Result<Block> {
        let offset = Some(self.take_offset(len, category)?);
        Ok(Block { arena: Arc::clone(self), offset, len, category })
    }

    fn take_offset(&self, len: usize, category: Category) -> Result<usize> {
        // No length that is asked for may overflow on its way to being refused.
        self.check_room(len, category)?;
        let padded = len.next_multiple_of(ALIGNMENT);
        self.counter.take(category, padded)?;
        let mut blocks = self.blocks();
        let Some(offset) = blocks.free.take(padded) else {
            self.counter.give(category, padded);
            return Err(self.out_of_memory(len, category));
        };
        if let Err(source) = self.make_accessible(&mut blocks, offset + padded) {
            blocks.free.give(offset, padded);
            self.counter.give(category, padded);
            return Err(self.refused(len, category, source));
        }
        drop(blocks);
        if let Some(backend) = self.backend.get() {
            let start = self.memory.address(offset);
            backend.reuse(OperandMut::new(Operand::new(start, padded, ([padded].into(), DType::U8), true)));
        }
        Ok(offset)
    }

    /// Lets blocks lie in the bytes before `end`.
    fn make_accessible(&self, blocks: &mut Blocks, end: usize) -> rustix::io::Result<()> {
        if end <= blocks.accessible {
            return Ok(());
        }
        blocks.accessible = self.memory.make_accessible(blocks.accessible..end)?;
        Ok(())
    }

    fn blocks(&self) -> MutexGuard<'_, Blocks> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
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

    pub(crate) fn category(&self) -> Category {
        self.category
    }

    pub(crate) fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Gives the memory back, and with it what it holds.
    pub(crate) fn release(&mut self) {
        let Some(offset) = self.offset.take() else { return };
        let padded = self.len.next_multiple_of(ALIGNMENT);
        self.arena.counter.give(self.category, padded);
        self.arena.blocks().free.give(offset, padded);
    }

    /// Takes memory again, with whatever its last user left in it.
    pub(crate) fn retake(&mut self) -> Result<()> {
        if self.offset.is_none() {
            self.offset = Some(self.arena.take_offset(self.len, self.category)?);
        }
        Ok(())
    }

    fn offset(&self) -> usize {
        self.offset.expect("memory is here when it is worked with")
    }

    /// All of it, as an array of a shape and type. Panics if its memory was given back.
    pub(crate) fn operand(&self, of: (Shape, DType)) -> Operand {
        Operand::new(self.start(), self.len, of, self.arena.memory.is_detached())
    }

    fn start(&self) -> NonNull<u8> {
        self.arena.memory.address(self.offset())
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.release();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::cpu::mapping::PAGE;

    impl Block {
        fn bytes(&self) -> &[u8] {
            // SAFETY: within the accessible part of the mapping, and no other block overlaps.
            unsafe { std::slice::from_raw_parts(self.start().as_ptr(), self.len) }
        }

        fn bytes_mut(&mut self) -> &mut [u8] {
            // SAFETY: as in `bytes`, and the borrow of `self` is unique.
            unsafe { std::slice::from_raw_parts_mut(self.start().as_ptr(), self.len) }
        }
    }

    #[test]
    fn blocks_are_counted_reused_and_apart() {
        let counter = Arc::new(MemoryCounter::new(None));
        let arena = Arc::new(Arena::reserve(PageSource::Transparent, Arc::clone(&counter)).unwrap());
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
    fn reserved_pages_are_there_or_refused() {
        let counter = Arc::new(MemoryCounter::new(None));
        let Ok(arena) = Arena::reserve(PageSource::Reserved, Arc::clone(&counter)) else {
            let pool = std::path::Path::new("/sys/kernel/mm/hugepages/hugepages-2048kB");
            return assert!(!pool.exists(), "the system has such pages");
        };
        let arena = Arc::new(arena);
        // One page, not the whole pool, which may have other users. Most hosts have none.
        let mut block = match arena.take(PAGE, Category::Activations) {
            Err(error) => {
                assert!(error.to_string().contains("the pool of huge pages has too few left for"), "{error}");
                return assert_eq!(counter.usage(Category::Activations).current, 0);
            }
            Ok(block) => block,
        };
        block.bytes_mut().fill(7);
        drop(block);
        // Other programs could take what is given back.
        arena.trim();
        assert!(arena.take(PAGE, Category::Activations).unwrap().bytes().iter().all(|&byte| byte == 7));
    }

    #[test]
    fn trimming_takes_nothing_from_blocks() {
        let arena =
            Arc::new(Arena::reserve(PageSource::Transparent, Arc::new(MemoryCounter::new(None))).unwrap());
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
}
