use super::mapping::{HUGE_PAGE, Mapping};
use crate::PageSize;
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, ftruncate, memfd_create,
};
use rustix::io::retry_on_intr;
use rustix::param;
use rustix::process::{Resource, getrlimit};
use rustix::system::sysinfo;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Maximum address space that the arenas of all ranks together reserve in one process. A process has 128 TiB.
const ADDRESS_BYTES: usize = 1 << 45;

/// Initial address space of the arena of a [dry](crate::Group::dry) group. Halved until the process has that much left.
const DRY_BYTES: usize = 1 << 42;

/// Minimum address space of a dry arena. Less is an error.
const DRY_BYTES_MIN: usize = 1 << 24;

/// The shared memory of one rank: reserves address space for the host's memory size, and allocates memory only for regions in use.
pub(crate) struct Arena {
    /// The file that peers map. `None` in a dry group, which has no peers.
    memfd: Option<OwnedFd>,
    mapping: Arc<Mapping>,
    /// Free ranges, sorted and not adjacent. They read as zeros, except in a dry arena.
    free: Mutex<Vec<Range<usize>>>,
    /// Whether peers may still write to buffers that this rank has dropped.
    is_retired: AtomicBool,
}

impl Arena {
    /// Creates the arena of one of `world_size` ranks. A process maps the arenas of all of them.
    pub(crate) fn new(world_size: usize) -> io::Result<Arc<Self>> {
        let host = sysinfo();
        let host_bytes = host.totalram as u64 * u64::from(host.mem_unit.max(1));
        let share = ADDRESS_BYTES / world_size;
        let len = usize::try_from(host_bytes).map_or(share, |bytes| bytes.min(share));
        let len = len.next_multiple_of(HUGE_PAGE);

        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memory = memfd_create(c"trireme-arena", flags)?;
        ftruncate(&memory, len as u64)?;
        fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        let mapping = Mapping::new(&memory, len)?;
        Ok(Arena::of(mapping, Some(memory)))
    }

    /// Creates an arena that reserves addresses but no memory, so its buffers may exceed the machine's memory.
    pub(crate) fn dry() -> io::Result<Arc<Self>> {
        let allowed = getrlimit(Resource::As).current.map_or(usize::MAX, |bytes| bytes as usize / 4);
        let mut len = DRY_BYTES.min(allowed) / param::page_size() * param::page_size();
        loop {
            let mapping = Mapping::private(len).or_else(|refused| {
                // Strict overcommit accounting refuses a private writable mapping of this size, but counts no memory for a sparse file. A
                // file longer than `ulimit -f` would kill the process.
                if getrlimit(Resource::Fsize).current.is_some() { Err(refused) } else { sparse(len) }
            });
            match mapping {
                Ok(mapping) => return Ok(Arena::of(mapping, None)),
                Err(_) if len > DRY_BYTES_MIN => len = len / 2 / param::page_size() * param::page_size(),
                Err(error) => return Err(error),
            }
        }
    }

    fn of(mapping: Mapping, memory: Option<OwnedFd>) -> Arc<Self> {
        let everything = 0..mapping.len();
        Arc::new(Arena {
            memfd: memory,
            mapping: Arc::new(mapping),
            free: Mutex::new(Vec::from([everything])),
            is_retired: AtomicBool::new(false),
        })
    }

    /// Allocates `num_bytes` of zeroed memory. Pages are reserved, so accessing them cannot fail.
    ///
    /// Memory for huge pages is taken from the end of the arena, apart from other memory, because accessing a huge page maps all of it. It
    /// stays in base pages until all bytes of a huge page are allocated.
    pub(crate) fn allocate(self: &Arc<Self>, num_bytes: usize, page_size: PageSize) -> io::Result<Region> {
        let len = num_bytes
            .max(1)
            .checked_next_multiple_of(param::page_size())
            .ok_or(io::ErrorKind::OutOfMemory)?;
        let (range, full) = self.take(len, page_size).ok_or(io::ErrorKind::OutOfMemory)?;
        if let Some(memory) = &self.memfd {
            if let Err(error) = reserve(memory, range.clone()) {
                self.free_range(range);
                return Err(error);
            }
            if page_size == PageSize::Huge && !full.is_empty() {
                self.mapping.make_huge(full);
            }
        }
        Ok(Region { arena: Arc::clone(self), range, frees_on_drop: true })
    }

    /// Like [`allocate`](Arena::allocate), for memory that is never reused: peers may access it after this rank is done with it.
    pub(crate) fn allocate_permanent(self: &Arc<Self>, num_bytes: usize) -> io::Result<Region> {
        let mut region = self.allocate(num_bytes, PageSize::Base)?;
        region.frees_on_drop = false;
        Ok(region)
    }

    /// Stops the reuse of freed memory, because peers may still write to it.
    pub(crate) fn retire(&self) {
        self.is_retired.store(true, Ordering::Release);
    }

    /// Whether buffers have addresses but no reserved memory.
    pub(crate) fn is_dry(&self) -> bool {
        self.memfd.is_none()
    }

    pub(crate) fn mapping(&self) -> &Arc<Mapping> {
        &self.mapping
    }

    /// Takes the first free bytes, or the last ones for huge pages. Also returns the huge pages that are now fully allocated.
    fn take(&self, len: usize, page_size: PageSize) -> Option<(Range<usize>, Range<usize>)> {
        let mut free = self.free.lock().expect("no thread panics while it holds the list");
        let fits = |range: &Range<usize>| range.len() >= len;
        let (index, taken) = match page_size {
            PageSize::Base => {
                let index = free.iter().position(fits)?;
                let start = free[index].start;
                free[index].start += len;
                (index, start..start + len)
            }
            PageSize::Huge => {
                let index = free.iter().rposition(fits)?;
                free[index].end -= len;
                let start = free[index].end;
                (index, start..start + len)
            }
        };
        if free[index].is_empty() {
            free.remove(index);
        }
        let full = full_huge_pages(&free, &taken, self.mapping.len());
        Some((taken, full))
    }

    /// Frees a range: releases its pages and adds it to the free list. It reads as zeros again, except in a dry arena.
    fn free_range(&self, range: Range<usize>) {
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let punch = |memory| fallocate(memory, flags, range.start as u64, range.len() as u64);
        let is_refused = self.memfd.as_ref().is_some_and(|memory| punch(memory).is_err());
        if is_refused || self.is_retired.load(Ordering::Acquire) {
            return;
        }
        let mut free = self.free.lock().expect("no thread panics while it holds the list");
        let index = free.partition_point(|other| other.start < range.start);
        free.insert(index, range);
        if free.get(index + 1).is_some_and(|next| next.start == free[index].end) {
            free[index].end = free.remove(index + 1).end;
        }
        if index > 0 && free[index - 1].end == free[index].start {
            free[index - 1].end = free.remove(index).end;
        }
    }
}

impl AsFd for Arena {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.memfd.as_ref().expect("peers map the arena of a group that is not dry").as_fd()
    }
}

/// The huge pages of an arena of `len` bytes that overlap `taken` and have no `free` byte.
fn full_huge_pages(free: &[Range<usize>], taken: &Range<usize>, len: usize) -> Range<usize> {
    let next = free.partition_point(|range| range.end <= taken.start);
    let used_from = next.checked_sub(1).map_or(0, |before| free[before].end);
    let used_to = free.get(next).map_or(len, |range| range.start);
    let first = used_from.max(taken.start / HUGE_PAGE * HUGE_PAGE).next_multiple_of(HUGE_PAGE);
    let end = used_to.min(taken.end.next_multiple_of(HUGE_PAGE)) / HUGE_PAGE * HUGE_PAGE;
    first..end.max(first)
}

/// Maps a sparse file without a name.
fn sparse(len: usize) -> io::Result<Mapping> {
    let memory = memfd_create(c"trireme-dry", MemfdFlags::CLOEXEC)?;
    ftruncate(&memory, len as u64)?;
    Mapping::new(&memory, len)
}

/// Reserves pages, or fails if there is no memory for them. Accessing a page that is not reserved could kill the process.
fn reserve(memory: &OwnedFd, range: Range<usize>) -> io::Result<()> {
    let allocate = || fallocate(memory, FallocateFlags::empty(), range.start as u64, range.len() as u64);
    Ok(retry_on_intr(allocate)?)
}

/// A range of an arena's memory, allocated to one owner.
pub(crate) struct Region {
    arena: Arc<Arena>,
    range: Range<usize>,
    /// Whether the range is freed when the region is dropped.
    frees_on_drop: bool,
}

impl Region {
    pub(crate) fn offset(&self) -> usize {
        self.range.start
    }

    pub(crate) fn is_in(&self, arena: &Arc<Arena>) -> bool {
        Arc::ptr_eq(&self.arena, arena)
    }

    pub(crate) fn len(&self) -> usize {
        self.range.len()
    }

    /// The address of the first byte. For callers that share the bytes with peers, and so must not hold a reference to them.
    pub(crate) fn as_mut_ptr(&self) -> *mut u8 {
        self.arena.mapping.at(self.range.start, self.len())
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the range is mapped as long as the arena, which `self` keeps, and no other region has it. Peers access a buffer only
        // during an operation, which owns the buffer and has its address from a `VectorRef`. An area, which peers access at any time, is
        // used by its address only.
        unsafe { std::slice::from_raw_parts(self.as_mut_ptr().cast_const(), self.len()) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `bytes`, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr(), self.len()) }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if self.frees_on_drop {
            self.arena.free_range(self.range.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reused_memory_is_zeroed() {
        let arena = Arena::new(2).expect("an arena");
        let mut first = arena.allocate(5000, PageSize::Base).expect("memory");
        let place = first.offset();
        first.bytes_mut().fill(7);
        let second = arena.allocate(1, PageSize::Base).expect("memory");
        assert_ne!(second.offset(), place);
        drop(first);
        let third = arena.allocate(8000, PageSize::Base).expect("memory");
        assert_eq!(third.offset(), place);
        assert!(third.bytes().iter().all(|&byte| byte == 0));
    }

    #[test]
    fn full_huge_pages_keep_their_contents() {
        let arena = Arena::new(2).expect("an arena");
        let end = arena.mapping.len();
        let fill = |len: usize, page_size, value| {
            let mut region = arena.allocate(len, page_size).expect("memory");
            assert!(region.bytes().iter().all(|&byte| byte == 0));
            region.bytes_mut().fill(value);
            region
        };
        let (first, small) =
            (fill(HUGE_PAGE / 4 * 3, PageSize::Huge, 1), fill(HUGE_PAGE / 2, PageSize::Base, 2));
        assert_eq!((first.offset(), small.offset()), (end - HUGE_PAGE / 4 * 3, 0));
        let (second, third) =
            (fill(HUGE_PAGE / 2, PageSize::Huge, 3), fill(3 * HUGE_PAGE, PageSize::Huge, 4));
        drop(second);
        let second = fill(HUGE_PAGE / 4, PageSize::Huge, 5);
        assert_eq!(second.offset(), end - HUGE_PAGE);
        for (region, value) in [(first, 1), (small, 2), (third, 4), (second, 5)] {
            assert!(region.bytes().iter().all(|&byte| byte == value), "{value}");
        }
    }

    #[test]
    fn a_huge_page_is_taken_when_no_byte_of_it_is_free() {
        let arena = Arena::new(2).expect("an arena");
        let end = arena.mapping.len();
        let page = |num: usize| end - num * HUGE_PAGE;
        let take = |len, page_size| arena.take(len, page_size).expect("memory").1;
        assert!(take(HUGE_PAGE / 4 * 3, PageSize::Huge).is_empty());
        assert_eq!(take(HUGE_PAGE / 2, PageSize::Huge), page(1)..end);
        assert_eq!(take(3 * HUGE_PAGE, PageSize::Huge), page(4)..page(1));
        let rest = end - HUGE_PAGE / 4 * 17 - 4096;
        assert_eq!(take(rest, PageSize::Base), 0..page(5));
        assert_eq!(take(4096, PageSize::Huge), page(5)..page(4));
    }

    #[test]
    fn freed_neighbors_become_one_range() {
        let arena = Arena::new(2).expect("an arena");
        let regions: Vec<_> = (0..4).map(|_| arena.allocate(100, PageSize::Base).expect("memory")).collect();
        let [a, b, c, d]: [Region; 4] = regions.try_into().ok().expect("four regions");
        for region in [b, d, a, c] {
            drop(region);
        }
        assert_eq!(arena.free.lock().expect("the list").len(), 1);
    }

    #[test]
    fn a_retired_arena_reuses_no_memory() {
        let arena = Arena::new(2).expect("an arena");
        let first = arena.allocate(100, PageSize::Base).expect("memory");
        let place = first.offset();
        arena.retire();
        drop(first);
        assert_ne!(arena.allocate(100, PageSize::Base).expect("memory").offset(), place);
    }

    #[test]
    fn more_than_the_host_has_is_refused() {
        let arena = Arena::new(2).expect("an arena");
        for bytes in [usize::MAX, usize::MAX / 4] {
            let refused = arena.allocate(bytes, PageSize::Base).err().map(|error| error.kind());
            assert_eq!(refused, Some(io::ErrorKind::OutOfMemory));
        }
    }
}
