//! Memory for tensors: one reserved range of addresses, cut into blocks.
//!
//! Pages are taken from the system when first touched, so the resident size of the process follows what is
//! counted. Freed blocks are merged with their neighbours and reused, best fit first: after the first step
//! every request finds its block, and nothing is allocated.

use crate::device::Queue;
use crate::kernels::cpu::free_list::FreeList;
use crate::kernels::{Place, PlaceMut};
use crate::memory::{MemoryCounter, OverBudget, describe};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{
    Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap, mmap_anonymous, mprotect, munmap,
};
use rustix::process::{Resource, getrlimit};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use trireme_base::{Bytes, Category, DType};

/// Blocks begin at multiples of this: a cache line, and the widest SIMD register.
pub(crate) const ALIGNMENT: usize = 64;

/// The least that the system takes back; a multiple of its pages.
const PAGE: usize = 64 << 10;

/// Memory is made accessible in multiples of this: a huge page, so that none is split where the accessible part ends.
const STEP: usize = 2 << 20;

/// Addresses of an arena that only counts: more than any model needs, and less than a process has.
const COUNTING_BYTES: usize = 1 << 45;

/// One arena reserves at most 1/4 of the addresses that `ulimit -v` allows.
const ADDRESSES_SHARE: usize = 4;

/// Fewer addresses than this are an error.
const ADDRESSES_MIN: usize = 1 << 24;

/// A range of memory handed out in blocks.
#[derive(Debug)]
pub(crate) struct Arena {
    memory: Arc<Mapping>,
    blocks: Mutex<Blocks>,
    counter: Arc<MemoryCounter>,
    /// What is issued and may still work with memory that was given back.
    queue: OnceLock<Arc<Queue>>,
}

/// Addresses that the system has reserved for an arena, as long as this is there.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    num_bytes: usize,
    /// Where kernels find the same memory, if the host can neither read nor write it.
    detached: Option<NonNull<u8>>,
}

// SAFETY: addresses, whose memory is only reached through blocks, which do not overlap; `Place` says why kernels may.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Where kernels find the bytes that the host knows at `start`.
    ///
    /// # Panics
    /// If they lie outside.
    pub(crate) fn translate(&self, start: NonNull<u8>, num_bytes: usize) -> NonNull<u8> {
        let offset = start.addr().get().checked_sub(self.start.addr().get());
        let offset =
            offset.filter(|offset| offset.checked_add(num_bytes).is_some_and(|end| end <= self.num_bytes));
        let offset = offset.expect("a kernel was given memory of another device, or of the host");
        // SAFETY: within the mapping by the line above.
        unsafe { self.detached.unwrap_or(self.start).add(offset) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        for start in [Some(self.start), self.detached].into_iter().flatten() {
            // SAFETY: mapped with this length; no block is left, for each holds the arena, and no kernel, for its processor holds this.
            let _ = unsafe { munmap(start.as_ptr().cast(), self.num_bytes) };
        }
    }
}

/// Which bytes of an arena belong to no block, and which a block may lie in.
#[derive(Debug)]
struct Blocks {
    free: FreeList,
    /// Bytes from the start on that may be read and written. Those after them are addresses and nothing else, for which
    /// no system asks whether it has the memory.
    accessible: usize,
}

/// No block of the size asked for.
#[derive(Debug, thiserror::Error)]
pub(crate) enum OutOfMemory {
    /// It is more than the machine has.
    #[error(
        "out of memory: {requested} for {category} do not fit into the {reserved} of this device ({in_use}); use a \
         smaller local_batch_size or seq_len, or a machine with more memory"
    )]
    Machine { requested: Bytes, category: Category, reserved: Bytes, in_use: String },
    /// The system gives no more memory to this process.
    #[error(
        "out of memory: the system refuses {requested} for {category} ({in_use}): {source}; if the machine has as much, see whether \
         `ulimit -d`, `ulimit -v` or the setting vm.overcommit_memory = 2 keeps it back"
    )]
    Refused { requested: Bytes, category: Category, in_use: String, source: std::io::Error },
    /// It is more than the budget.
    #[error(transparent)]
    Budget(#[from] OverBudget),
}

impl Arena {
    /// Reserves addresses for as much memory as the machine has, or as many as the process may have; takes no memory.
    pub(crate) fn reserve(counter: Arc<MemoryCounter>) -> std::io::Result<Self> {
        let mut reserved = addresses(machine_bytes());
        loop {
            match map_private(reserved, ProtFlags::empty()) {
                Ok(start) => {
                    return Ok(Self::new(Mapping { start, num_bytes: reserved, detached: None }, 0, counter));
                }
                Err(_) if reserved > ADDRESSES_MIN => reserved = reserved / 2 / PAGE * PAGE,
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// As [`reserve`](Arena::reserve), of memory that kernels find elsewhere, and that the host can neither read nor write.
    pub(crate) fn detached(counter: Arc<MemoryCounter>) -> std::io::Result<Self> {
        let num_bytes = addresses(machine_bytes());
        // Making a file longer than `ulimit -f` allows would end the process.
        if getrlimit(Resource::Fsize).current.is_some_and(|max| max < num_bytes as u64) {
            return Err(rustix::io::Errno::FBIG.into());
        }
        let start = map_private(num_bytes, ProtFlags::empty())?;
        // From here on the addresses are given back if the file cannot be mapped.
        let mut mapping = Mapping { start, num_bytes, detached: None };
        mapping.detached = Some(map_file(num_bytes)?);
        Ok(Self::new(mapping, num_bytes, counter))
    }

    /// An arena of a device that only counts, whose blocks may be larger than the machine's memory: few of their pages are ever
    /// touched.
    pub(crate) fn counting(counter: Arc<MemoryCounter>) -> std::io::Result<Self> {
        let mut num_bytes = addresses(COUNTING_BYTES);
        loop {
            let start = map_private(num_bytes, ACCESS).or_else(|refused| {
                // Where the system sets memory aside for all that may be written, it does not for a file without pages. Making
                // one longer than `ulimit -f` allows would end the process.
                if getrlimit(Resource::Fsize).current.is_some() { Err(refused) } else { map_file(num_bytes) }
            });
            match start {
                Ok(start) => {
                    return Ok(Self::new(Mapping { start, num_bytes, detached: None }, num_bytes, counter));
                }
                // Others that count may have taken most addresses of the process.
                Err(_) if num_bytes > ADDRESSES_MIN => num_bytes = num_bytes / 2 / PAGE * PAGE,
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn new(memory: Mapping, accessible: usize, counter: Arc<MemoryCounter>) -> Self {
        let blocks = Mutex::new(Blocks { free: FreeList::new(memory.num_bytes), accessible });
        Arena { memory: Arc::new(memory), blocks, counter, queue: OnceLock::new() }
    }

    /// Hands memory out in the order of this queue from now on.
    pub(crate) fn order_by(&self, queue: &Arc<Queue>) {
        self.queue.get_or_init(|| Arc::clone(queue));
    }

    /// The memory itself.
    pub(crate) fn mapping(&self) -> &Arc<Mapping> {
        &self.memory
    }

    /// Refuses early what can never fit.
    pub(crate) fn check_room(&self, len: usize, category: Category) -> Result<(), OutOfMemory> {
        if len <= self.memory.num_bytes { Ok(()) } else { Err(self.out_of_memory(len, category)) }
    }

    fn out_of_memory(&self, len: usize, category: Category) -> OutOfMemory {
        OutOfMemory::Machine {
            requested: Bytes(len as u64),
            category,
            reserved: Bytes(self.memory.num_bytes as u64),
            in_use: describe(&self.counter.in_use()),
        }
    }

    /// Gives the pages of free memory back to the system.
    pub(crate) fn trim(&self) {
        // Kernels that have not run may still read what was given back.
        if self.memory.detached.is_some() {
            return;
        }
        let blocks = self.blocks();
        for span in &blocks.free.spans {
            let end = (span.offset + span.len).min(blocks.accessible);
            let (start, end) = (span.offset.next_multiple_of(PAGE), end / PAGE * PAGE);
            if start < end {
                // SAFETY: pages within the mapping of which no block has a part: nobody reads them before writing them anew.
                // A system that refuses keeps them.
                let _ = unsafe {
                    madvise(self.memory.start.as_ptr().add(start).cast(), end - start, Advice::LinuxDontNeed)
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
        let mut blocks = self.blocks();
        let Some(offset) = blocks.free.take(padded) else {
            self.counter.give(category, padded);
            return Err(self.out_of_memory(len, category));
        };
        if let Err(source) = self.make_accessible(&mut blocks, offset + padded) {
            blocks.free.give(offset, padded);
            self.counter.give(category, padded);
            let (requested, in_use) = (Bytes(len as u64), describe(&self.counter.in_use()));
            return Err(OutOfMemory::Refused { requested, category, in_use, source: source.into() });
        }
        drop(blocks);
        if let Some(queue) = self.queue.get() {
            // SAFETY: within the mapping.
            let start = unsafe { self.memory.start.add(offset) };
            queue.reuse(PlaceMut::new(Place::new(start, padded, DType::U8, true)));
        }
        Ok(offset)
    }

    /// Lets blocks lie in the bytes before `end`.
    fn make_accessible(&self, blocks: &mut Blocks, end: usize) -> rustix::io::Result<()> {
        if end <= blocks.accessible {
            return Ok(());
        }
        let address = self.memory.start.addr().get();
        let end = ((address + end).next_multiple_of(STEP) - address).min(self.memory.num_bytes);
        // SAFETY: within the mapping, and no block has a part of it yet.
        unsafe {
            let first = self.memory.start.as_ptr().add(blocks.accessible).cast();
            mprotect(first, end - blocks.accessible, MprotectFlags::READ | MprotectFlags::WRITE)?;
        }
        blocks.accessible = end;
        Ok(())
    }

    fn blocks(&self) -> MutexGuard<'_, Blocks> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes of this machine's memory, or more.
fn machine_bytes() -> usize {
    let system = rustix::system::sysinfo();
    (system.totalram as usize * system.mem_unit.max(1) as usize).max(1 << 30)
}

/// What blocks are for.
const ACCESS: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

/// How many addresses to ask for where `num_bytes` are wanted: with `ulimit -v` the process needs some for other things, too.
fn addresses(num_bytes: usize) -> usize {
    let allowed =
        getrlimit(Resource::As).current.map_or(usize::MAX, |bytes| bytes as usize / ADDRESSES_SHARE);
    num_bytes.min(allowed) / PAGE * PAGE
}

fn map_private(num_bytes: usize, access: ProtFlags) -> rustix::io::Result<NonNull<u8>> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a fresh anonymous mapping at an address of the system's choice.
    let start = unsafe { mmap_anonymous(std::ptr::null_mut(), num_bytes, access, flags)? };
    // Fewer TLB misses; a system without huge pages may refuse, at no loss but speed.
    // SAFETY: the range has just been mapped.
    let _ = unsafe { madvise(start, num_bytes, Advice::LinuxHugepage) };
    Ok(NonNull::new(start.cast()).expect("the system maps nothing at address 0"))
}

/// Maps a file that has no name and no pages.
fn map_file(num_bytes: usize) -> rustix::io::Result<NonNull<u8>> {
    let file = memfd_create(c"trireme-device", MemfdFlags::CLOEXEC)?;
    ftruncate(&file, num_bytes as u64)?;
    // SAFETY: a fresh mapping at an address of the system's choice; nobody else has the file, which reads as zero.
    let start = unsafe { mmap(std::ptr::null_mut(), num_bytes, ACCESS, MapFlags::SHARED, &file, 0)? };
    Ok(NonNull::new(start.cast()).expect("the system maps nothing at address 0"))
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
        self.arena.blocks().free.give(offset, padded);
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

    /// Where it lies, as elements of a type.
    ///
    /// # Panics
    /// If its memory was given back.
    pub(crate) fn place(&self, dtype: DType) -> Place {
        Place::new(self.start(), self.len, dtype, self.arena.memory.detached.is_some())
    }

    fn start(&self) -> NonNull<u8> {
        // SAFETY: within the mapping.
        unsafe { self.arena.memory.start.add(self.offset()) }
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
}
