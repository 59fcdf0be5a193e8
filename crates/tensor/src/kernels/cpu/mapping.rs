//! Addresses of the process, and the pages behind them.

use crate::memory::PageSource;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{
    Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap, mmap_anonymous, mprotect, munmap,
};
use rustix::process::{Resource, getrlimit};
use std::ops::Range;
use std::ptr::NonNull;
use trireme_base::HUGE_PAGE_BYTES;

/// The least that the system takes back; a multiple of its pages.
pub(super) const PAGE: usize = 64 << 10;

/// Addresses of an arena that only counts: more than any model needs, and less than a process has.
const COUNTING_BYTES: usize = 1 << 45;

/// One mapping reserves at most 1/4 of the addresses that `ulimit -v` allows.
const ADDRESSES_SHARE: usize = 4;

/// Fewer addresses than this are an error.
const ADDRESSES_MIN: usize = 1 << 24;

/// What blocks are for.
const ACCESS: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

/// Addresses that the system has reserved, as long as this is there.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    num_bytes: usize,
    /// Where kernels find the same memory, if the host can neither read nor write it.
    detached: Option<NonNull<u8>>,
    page_source: PageSource,
}

// SAFETY: addresses, whose memory is only reached through blocks, which do not overlap; `Operand` says why kernels may.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Addresses for as much memory as the machine has, or as many as the process may have, none of it
    /// [accessible](Mapping::make_accessible); takes no memory.
    pub(super) fn reserve(page_source: PageSource) -> std::io::Result<Self> {
        let mut mapping = halving(addresses(machine_bytes()), |num_bytes| match page_source {
            PageSource::Transparent => map_private(num_bytes, ProtFlags::empty()),
            PageSource::Reserved => {
                map_anonymous(num_bytes, ProtFlags::empty(), MapFlags::HUGETLB | MapFlags::HUGE_2MB)
            }
        })?;
        mapping.page_source = page_source;
        Ok(mapping)
    }

    /// As [`reserve`](Mapping::reserve), of memory that kernels find elsewhere, and that the host can neither read nor write.
    pub(super) fn detached() -> std::io::Result<Self> {
        let num_bytes = addresses(machine_bytes());
        // Making a file longer than `ulimit -f` allows would end the process.
        if getrlimit(Resource::Fsize).current.is_some_and(|max| max < num_bytes as u64) {
            return Err(rustix::io::Errno::FBIG.into());
        }
        let start = map_private(num_bytes, ProtFlags::empty())?;
        // From here on the addresses are given back if the file cannot be mapped.
        let mut mapping = Mapping::of(start, num_bytes);
        mapping.detached = Some(map_file(num_bytes)?);
        Ok(mapping)
    }

    /// Accessible addresses of a device that only counts, whose blocks may be larger than the machine's memory: few of their pages are
    /// ever touched. Others that count may have taken most addresses of the process.
    pub(super) fn counting() -> std::io::Result<Self> {
        halving(addresses(COUNTING_BYTES), |num_bytes| {
            map_private(num_bytes, ACCESS).or_else(|refused| {
                // Where the system sets memory aside for all that may be written, it does not for a file without pages. Making
                // one longer than `ulimit -f` allows would end the process.
                if getrlimit(Resource::Fsize).current.is_some() { Err(refused) } else { map_file(num_bytes) }
            })
        })
    }

    fn of(start: NonNull<u8>, num_bytes: usize) -> Self {
        Mapping { start, num_bytes, detached: None, page_source: PageSource::Transparent }
    }

    pub(super) fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    pub(super) fn page_source(&self) -> PageSource {
        self.page_source
    }

    /// Whether the host can neither read nor write the memory.
    pub(super) fn is_detached(&self) -> bool {
        self.detached.is_some()
    }

    /// The address of byte `offset`, as the host knows it. Panics if it lies outside.
    pub(super) fn address(&self, offset: usize) -> NonNull<u8> {
        assert!(offset <= self.num_bytes, "byte {offset} of {}", self.num_bytes);
        // SAFETY: within the mapping, or at its end, by the line above.
        unsafe { self.start.add(offset) }
    }

    /// Returns the address at which kernels find the bytes that the host knows at `start`. Panics if they are outside the mapping.
    pub(crate) fn translate(&self, start: NonNull<u8>, num_bytes: usize) -> NonNull<u8> {
        let offset = start.addr().get().checked_sub(self.start.addr().get());
        let offset =
            offset.filter(|offset| offset.checked_add(num_bytes).is_some_and(|end| end <= self.num_bytes));
        let offset = offset.expect("a kernel was given memory of another device, or of the host");
        // SAFETY: within the mapping by the line above.
        unsafe { self.detached.unwrap_or(self.start).add(offset) }
    }

    /// Lets the bytes `range` be read and written, and some after them; the end of those. The end is rounded up to a huge page, so that none is split
    /// there. Pages of the host's pool are taken now: if the pool is empty when a page is first touched, SIGBUS ends the process.
    pub(super) fn make_accessible(&self, range: Range<usize>) -> rustix::io::Result<usize> {
        let address = self.start.addr().get();
        let end = ((address + range.end).next_multiple_of(HUGE_PAGE_BYTES) - address).min(self.num_bytes);
        let first = self.address(range.start).as_ptr().cast();
        // SAFETY: within the mapping, whose memory nobody reads or writes before this.
        unsafe { mprotect(first, end - range.start, MprotectFlags::READ | MprotectFlags::WRITE)? };
        if self.page_source == PageSource::Reserved {
            // SAFETY: as above; it changes no byte.
            unsafe { madvise(first, end - range.start, Advice::LinuxPopulateWrite)? };
        }
        Ok(end)
    }

    /// Gives the pages that lie within `range` back to the system, if it takes them: they are zeros then. Those of the host's pool are kept, for
    /// other processes could take them before they are touched again.
    ///
    /// # Safety
    /// Nobody reads them before writing them anew.
    pub(super) unsafe fn discard(&self, range: Range<usize>) {
        let (start, end) = (range.start.next_multiple_of(PAGE), range.end / PAGE * PAGE);
        if start < end && self.page_source == PageSource::Transparent {
            let first = self.address(start).as_ptr().cast();
            // SAFETY: within the mapping; nobody reads them by the caller's promise. A system that refuses keeps them.
            let _ = unsafe { madvise(first, end - start, Advice::LinuxDontNeed) };
        }
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

/// Maps so many bytes, or the half of them, and so on.
fn halving(
    mut num_bytes: usize,
    map: impl Fn(usize) -> rustix::io::Result<NonNull<u8>>,
) -> std::io::Result<Mapping> {
    loop {
        match map(num_bytes) {
            Ok(start) => return Ok(Mapping::of(start, num_bytes)),
            Err(_) if num_bytes > ADDRESSES_MIN => {
                num_bytes = num_bytes / 2 / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Bytes of this machine's memory, or more.
fn machine_bytes() -> usize {
    let system = rustix::system::sysinfo();
    (system.totalram as usize * system.mem_unit.max(1) as usize).max(1 << 30)
}

/// How many addresses to ask for where `num_bytes` are wanted: with `ulimit -v` the process needs some for other things, too.
fn addresses(num_bytes: usize) -> usize {
    let allowed =
        getrlimit(Resource::As).current.map_or(usize::MAX, |bytes| bytes as usize / ADDRESSES_SHARE);
    num_bytes.min(allowed) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
}

fn map_private(num_bytes: usize, access: ProtFlags) -> rustix::io::Result<NonNull<u8>> {
    let start = map_anonymous(num_bytes, access, MapFlags::empty())?;
    // Fewer TLB misses; a system without huge pages may refuse, at no loss but speed.
    // SAFETY: the range has just been mapped.
    let _ = unsafe { madvise(start.as_ptr().cast(), num_bytes, Advice::LinuxHugepage) };
    Ok(start)
}

/// Maps addresses, for which the system sets no memory aside.
fn map_anonymous(num_bytes: usize, access: ProtFlags, more: MapFlags) -> rustix::io::Result<NonNull<u8>> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | more;
    // SAFETY: a fresh anonymous mapping at an address of the system's choice.
    let start = unsafe { mmap_anonymous(std::ptr::null_mut(), num_bytes, access, flags)? };
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
