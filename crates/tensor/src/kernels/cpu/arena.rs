//! Memory for tensors: one reserved range of addresses, split into blocks.
//!
//! An arena reserves addresses for all of the machine's memory, without access to them. Reserving uses no memory and counts only against
//! `ulimit -v`. Addresses become accessible as blocks need them, up to the next multiple of a huge page. The system provides a page when it
//! is first touched, so that the resident size of the process follows the counted bytes.
//!
//! Freed blocks are merged with adjacent free memory and reused, best fit first. After the first step, every request finds a free block,
//! and no memory is requested from the system.

use crate::device::{DeviceError, Result};
use crate::kernels::backend::Backend;
use crate::kernels::cpu::blocks_in_use::BlocksInUse;
use crate::kernels::cpu::free_list::FreeList;
use crate::kernels::cpu::mapping::Mapping;
use crate::kernels::cuda::DeviceAddresses;
use crate::kernels::host_pinning::HostPinning;
use crate::kernels::{Operand, OperandMut};
use crate::lent_memory::{LentMemory, OverflowAllocator};
use crate::memory::{MemoryCounter, OverBudget, PageSource, describe, largest_in_words};
use crate::shape::Shape;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use trireme_base::{Bytes, Category, DType};

/// Alignment of blocks in bytes: a cache line, and the widest SIMD register.
pub(crate) const ALIGNMENT: usize = 64;

/// A range of memory that is allocated in blocks.
#[derive(Debug)]
pub(crate) struct Arena {
    /// The backend whose kernels and copies may still use freed memory. Dropped before the memory.
    backend: OnceLock<Arc<dyn Backend>>,
    memory: Arc<Mapping>,
    state: Mutex<ArenaState>,
    counter: Arc<MemoryCounter>,
    /// The overflow allocator, with the bytes of the budget that activations must leave free.
    overflow: OnceLock<(Arc<dyn OverflowAllocator>, usize)>,
}

/// Free and accessible bytes of an arena.
#[derive(Debug)]
struct ArenaState {
    free: FreeList,
    in_use: BlocksInUse,
    /// End of the accessible bytes. Later addresses are only reserved: the system does not check whether it has memory for them.
    accessible: usize,
}

impl Arena {
    /// Reserves as many addresses as the machine has bytes of memory, or fewer if the process may not have as many. Allocates no memory.
    pub(crate) fn reserve(
        page_source: PageSource,
        pinning: Option<Box<dyn HostPinning>>,
        counter: Arc<MemoryCounter>,
    ) -> std::io::Result<Self> {
        Ok(Self::new(Mapping::reserve(page_source, pinning)?, 0, counter))
    }

    /// Like [`reserve`](Arena::reserve), for memory that kernels access at other addresses and that the host cannot access. Call
    /// [`set_backend`](Arena::set_backend) before memory is reused.
    pub(crate) fn detached(counter: Arc<MemoryCounter>) -> std::io::Result<Self> {
        Ok(Self::accessible(Mapping::detached()?, counter))
    }

    /// Creates the arena of a GPU. Call [`set_backend`](Arena::set_backend) before memory is reused.
    pub(crate) fn gpu(addresses: DeviceAddresses, counter: Arc<MemoryCounter>) -> Self {
        Self::new(Mapping::gpu(addresses), 0, counter)
    }

    /// Creates the arena of a counting device. Its blocks may exceed the machine's memory.
    pub(crate) fn counting(counter: Arc<MemoryCounter>) -> std::io::Result<Self> {
        Ok(Self::accessible(Mapping::counting()?, counter))
    }

    fn accessible(memory: Mapping, counter: Arc<MemoryCounter>) -> Self {
        let num_bytes = memory.num_bytes();
        Self::new(memory, num_bytes, counter)
    }

    fn new(memory: Mapping, accessible: usize, counter: Arc<MemoryCounter>) -> Self {
        let blocks = Mutex::new(ArenaState {
            free: FreeList::new(memory.num_bytes()),
            in_use: BlocksInUse::new(),
            accessible,
        });
        let (memory, backend, overflow) = (Arc::new(memory), OnceLock::new(), OnceLock::new());
        Arena { memory, state: blocks, counter, backend, overflow }
    }

    /// Calls [`Backend::reuse`] for every block allocated from now on, so that kernels wait for copies that still use its memory.
    pub(crate) fn set_backend(&self, backend: &Arc<dyn Backend>) {
        self.backend.get_or_init(|| Arc::clone(backend));
    }

    /// Sets an allocator for activations that do not fit into the budget minus `headroom` bytes.
    pub(crate) fn overflow_to(&self, overflow: Arc<dyn OverflowAllocator>, headroom: usize) {
        self.overflow.get_or_init(|| (overflow, headroom));
    }

    /// Returns whether `len` more bytes of activations would use memory that is reserved for other categories.
    pub(crate) fn is_overflowing(&self, len: usize, category: Category) -> bool {
        let Some((_, reserved)) = self.overflow.get().filter(|_| category == Category::Activations) else {
            return false;
        };
        let padded = len.checked_next_multiple_of(ALIGNMENT).unwrap_or(usize::MAX);
        let needed = self.counter.usage(category).current.saturating_add(padded);
        self.counter.budget().is_some_and(|budget| needed > budget.saturating_sub(*reserved))
    }

    /// Allocates overflow memory for activations; `None` if there is none.
    pub(crate) fn allocate_overflow(&self, len: usize, category: Category) -> Option<Box<dyn LentMemory>> {
        let overflow = self.overflow.get().filter(|_| category == Category::Activations);
        overflow.and_then(|(overflow, _)| overflow.allocate(len))
    }

    pub(crate) fn page_source(&self) -> PageSource {
        self.memory.page_source()
    }

    pub(crate) fn mapping(&self) -> &Arc<Mapping> {
        &self.memory
    }

    /// Returns the bytes that the system has provided so far, in use or not.
    pub(crate) fn accessible_bytes(&self) -> usize {
        self.lock_state().accessible
    }

    /// Returns an error if `len` exceeds the arena.
    pub(crate) fn check_room(&self, len: usize, category: Category) -> Result<()> {
        if len <= self.memory.num_bytes() { Ok(()) } else { Err(self.out_of_memory(len, category)) }
    }

    /// Returns the error of a request that exceeds the machine's memory.
    fn out_of_memory(&self, len: usize, category: Category) -> DeviceError {
        let [requested, reserved] = [len, self.memory.num_bytes()].map(|bytes| Bytes(bytes as u64));
        let in_use = self.describe_usage(&self.lock_state());
        DeviceError::OutOfMemory(format!(
            "out of memory: {requested} for {category} do not fit into the {reserved} of this device ({in_use}); use \
             smaller batches, shorter sequences, or a machine with more memory"
        ))
    }

    /// Describes the memory in use for error messages.
    fn describe_usage(&self, state: &ArenaState) -> String {
        let largest = state.in_use.describe_largest();
        format!("{}{}", describe(&self.counter.in_use()), largest_in_words(&largest))
    }

    /// Returns the error of a request that the system refuses: the process may have no more memory, the host's pool of huge pages is
    /// exhausted, the control group is at its limit, or the kernel is too old to populate pages.
    fn refused(
        &self,
        state: &ArenaState,
        len: usize,
        category: Category,
        source: std::io::Error,
    ) -> DeviceError {
        let (requested, in_use) = (Bytes(len as u64), self.describe_usage(state));
        if self.memory.is_detached() {
            return DeviceError::OutOfMemory(format!(
                "out of memory: the GPU has no {requested} left for {category} ({in_use}): {source}; use smaller batches or shorter sequences, \
                 shard state over more GPUs, or see whether another program uses this one"
            ));
        }
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

    /// Returns the pages of free memory to the system.
    pub(crate) fn trim(&self) {
        // Pending kernels may still read freed memory.
        if self.memory.is_detached() {
            return;
        }
        let blocks = self.lock_state();
        for span in &blocks.free.spans {
            let end = (span.offset + span.len).min(blocks.accessible);
            // SAFETY: no block overlaps the bytes.
            unsafe { self.memory.discard(span.offset..end) };
        }
    }

    /// Allocates a block with unspecified contents for an array.
    pub(crate) fn allocate(self: &Arc<Self>, array: (Shape, DType), category: Category) -> Result<Block> {
        let len = num_bytes(array, category)?;
        let place = Some(self.allocate_place(array, len, category)?);
        Ok(Block { arena: Arc::clone(self), place, len, category })
    }

    fn allocate_place(&self, array: (Shape, DType), len: usize, category: Category) -> Result<Place> {
        // Checked first, so that no later addition overflows.
        self.check_room(len, category)?;
        let padded = len.next_multiple_of(ALIGNMENT);
        // An allocation that may overflow has not failed yet.
        let may_overflow = self.overflow.get().is_some_and(|_| category == Category::Activations);
        self.counter.charge(category, padded).map_err(|refused| {
            let state = self.lock_state();
            let largest = if may_overflow { String::new() } else { state.in_use.describe_largest() };
            OverBudget { largest, ..refused }
        })?;
        let mut blocks = self.lock_state();
        let Some(offset) = blocks.free.allocate(padded) else {
            drop(blocks);
            self.counter.uncharge(category, padded);
            return Err(self.out_of_memory(len, category));
        };
        if let Err(source) = self.make_accessible(&mut blocks, offset + padded) {
            blocks.free.free(offset, padded);
            self.counter.uncharge(category, padded);
            return Err(self.refused(&blocks, len, category, source));
        }
        let slot = blocks.in_use.insert(array, category);
        drop(blocks);
        if let Some(backend) = self.backend.get() {
            let start = self.memory.address(offset);
            backend.reuse(OperandMut::new(Operand::new(start, padded, ([padded].into(), DType::U8), true)));
        }
        Ok(Place { offset, slot })
    }

    /// Makes the bytes before `end` accessible.
    fn make_accessible(&self, blocks: &mut ArenaState, end: usize) -> std::io::Result<()> {
        if end <= blocks.accessible {
            return Ok(());
        }
        blocks.accessible = self.memory.make_accessible(blocks.accessible..end)?;
        Ok(())
    }

    fn lock_state(&self) -> MutexGuard<'_, ArenaState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A block of an arena; freed when dropped.
#[derive(Debug)]
pub(crate) struct Block {
    arena: Arc<Arena>,
    /// `None` while the memory is released.
    place: Option<Place>,
    len: usize,
    category: Category,
}

/// The offset of a block in the arena, and its slot in the list of blocks in use.
#[derive(Debug, Clone, Copy)]
struct Place {
    offset: usize,
    slot: usize,
}

/// Returns the bytes of an array.
pub(crate) fn num_bytes((shape, dtype): (Shape, DType), category: Category) -> Result<usize> {
    shape.num_bytes(dtype).ok_or(DeviceError::Unaddressable { shape, dtype, category })
}

impl Block {
    /// Returns the size in bytes, also while the memory is released.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn category(&self) -> Category {
        self.category
    }

    pub(crate) fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Frees the memory, and with it its contents.
    pub(crate) fn release(&mut self) {
        let Some(Place { offset, slot }) = self.place.take() else { return };
        let padded = self.len.next_multiple_of(ALIGNMENT);
        self.arena.counter.uncharge(self.category, padded);
        let mut state = self.arena.lock_state();
        state.free.free(offset, padded);
        state.in_use.remove(slot);
    }

    /// Allocates memory again for an array of the same size, with unspecified contents.
    pub(crate) fn reallocate(&mut self, array: (Shape, DType)) -> Result<()> {
        if self.place.is_none() {
            self.place = Some(self.arena.allocate_place(array, self.len, self.category)?);
        }
        Ok(())
    }

    fn offset(&self) -> usize {
        self.place.expect("memory is here when it is worked with").offset
    }

    /// Returns the block as an array of a shape and dtype. Panics if its memory is released.
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
    use crate::kernels::cpu::mapping::RELEASE_GRANULARITY;

    fn bytes(len: usize) -> (Shape, DType) {
        ([len].into(), DType::U8)
    }

    impl Block {
        fn bytes(&self) -> &[u8] {
            // SAFETY: within the accessible part of the mapping; no other block overlaps.
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
        let arena = Arc::new(Arena::reserve(PageSource::Transparent, None, Arc::clone(&counter)).unwrap());
        let mut first = arena.allocate(bytes(100), Category::Parameters).unwrap();
        let mut second = arena.allocate(bytes(1), Category::Activations).unwrap();
        first.bytes_mut().fill(1);
        second.bytes_mut().fill(2);
        assert!(first.bytes().iter().all(|&byte| byte == 1));
        assert_eq!(counter.usage(Category::Parameters).current, 128);
        let address = first.bytes().as_ptr();
        drop(first);
        assert_eq!(counter.usage(Category::Parameters).current, 0);
        assert_eq!(arena.allocate(bytes(128), Category::Gradients).unwrap().bytes().as_ptr(), address);
        assert!(arena.allocate(bytes(usize::MAX / 2), Category::Gradients).is_err());
        assert_eq!(second.bytes(), [2]);
    }

    #[test]
    fn reserved_pages_are_there_or_refused() {
        let counter = Arc::new(MemoryCounter::new(None));
        let Ok(arena) = Arena::reserve(PageSource::Reserved, None, Arc::clone(&counter)) else {
            let pool = std::path::Path::new("/sys/kernel/mm/hugepages/hugepages-2048kB");
            return assert!(!pool.exists(), "the system has such pages");
        };
        let arena = Arc::new(arena);
        // Takes one page, because the pool may have other users. Most hosts have none.
        let mut block = match arena.allocate(bytes(RELEASE_GRANULARITY), Category::Activations) {
            Err(error) => {
                assert!(error.to_string().contains("the pool of huge pages has too few left for"), "{error}");
                return assert_eq!(counter.usage(Category::Activations).current, 0);
            }
            Ok(block) => block,
        };
        block.bytes_mut().fill(7);
        drop(block);
        // If the pages were returned, other programs could take them.
        arena.trim();
        assert!(
            arena
                .allocate(bytes(RELEASE_GRANULARITY), Category::Activations)
                .unwrap()
                .bytes()
                .iter()
                .all(|&byte| byte == 7)
        );
    }

    #[test]
    fn trimming_takes_nothing_from_blocks() {
        let arena = Arc::new(
            Arena::reserve(PageSource::Transparent, None, Arc::new(MemoryCounter::new(None))).unwrap(),
        );
        let mut blocks: Vec<Block> = (0..4)
            .map(|_| arena.allocate(bytes(3 * RELEASE_GRANULARITY + 64), Category::Optimizer).unwrap())
            .collect();
        blocks.iter_mut().for_each(|block| block.bytes_mut().fill(7));
        blocks[1].release();
        blocks.swap_remove(2);
        arena.trim();
        assert!(blocks[0].bytes().iter().chain(blocks[2].bytes()).all(|&byte| byte == 7));
        blocks[1].reallocate(bytes(3 * RELEASE_GRANULARITY + 64)).unwrap();
        assert!(
            blocks[1].bytes()[RELEASE_GRANULARITY..2 * RELEASE_GRANULARITY].iter().all(|&byte| byte == 0),
            "its pages were released"
        );
    }
}
