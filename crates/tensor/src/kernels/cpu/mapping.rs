//! Reserved address ranges and the pages behind them.

use crate::kernels::cuda::DeviceAddresses;
use crate::kernels::host_pinning::HostPinning;
use crate::memory::PageSource;
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{
    Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap, mmap_anonymous, mprotect, munmap,
};
use rustix::process::{Resource, getrlimit};
use std::ops::Range;
use std::ptr::NonNull;
use trireme_base::HUGE_PAGE_BYTES;

/// Granularity at which memory is returned to the system; a multiple of the page size.
pub(super) const RELEASE_GRANULARITY: usize = 64 << 10;

/// Size of the mapping of a counting arena: more than any model needs, less than the address space of a process.
const COUNTING_BYTES: usize = 1 << 45;

/// A mapping reserves at most `1 / ADDRESSES_DIVISOR` of the addresses that `ulimit -v` allows.
const ADDRESSES_DIVISOR: usize = 4;

/// If a mapping larger than this fails, it is retried with half the size.
const RESERVATION_BYTES_MIN: usize = 1 << 24;

/// Access rights of blocks.
const ACCESS: ProtFlags = ProtFlags::READ.union(ProtFlags::WRITE);

/// A range of addresses that is reserved until the mapping is dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    start: NonNull<u8>,
    num_bytes: usize,
    access: HostAccess,
    page_source: PageSource,
    /// Pins the pages of host memory that a GPU copies.
    pinning: Option<Box<dyn HostPinning>>,
}

/// Whether the host can access memory, and how kernels do.
#[derive(Debug)]
enum HostAccess {
    /// The host and kernels access the same addresses.
    Shared,
    /// The host cannot access the memory. Kernels access it at other addresses, which start here.
    Detached(NonNull<u8>),
    /// Memory of a GPU, which kernels access at the same addresses.
    Gpu(DeviceAddresses),
}

// SAFETY: a mapping only holds addresses. Memory is accessed only through blocks, which do not overlap; see `Operand` for kernels.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Reserves as many addresses as the machine has bytes of memory, or fewer if the process may not have as many. None of them is
    /// [accessible](Mapping::make_accessible). Allocates no memory.
    pub(super) fn reserve(
        page_source: PageSource,
        pinning: Option<Box<dyn HostPinning>>,
    ) -> std::io::Result<Self> {
        let mut mapping = map_or_halve(reservation_size(machine_bytes()), |num_bytes| match page_source {
            PageSource::Transparent => map_private(num_bytes, ProtFlags::empty()),
            PageSource::Reserved => {
                map_anonymous(num_bytes, ProtFlags::empty(), MapFlags::HUGETLB | MapFlags::HUGE_2MB)
            }
        })?;
        (mapping.page_source, mapping.pinning) = (page_source, pinning);
        Ok(mapping)
    }

    /// Like [`reserve`](Mapping::reserve), for memory that kernels access at other addresses and that the host cannot access.
    pub(super) fn detached() -> std::io::Result<Self> {
        let num_bytes = reservation_size(machine_bytes());
        // Extending a file beyond `ulimit -f` would kill the process.
        if getrlimit(Resource::Fsize).current.is_some_and(|max| max < num_bytes as u64) {
            return Err(rustix::io::Errno::FBIG.into());
        }
        let start = map_private(num_bytes, ProtFlags::empty())?;
        // From here on, dropping `mapping` unmaps the addresses if the file cannot be mapped.
        let mut mapping = Mapping::of(start, num_bytes);
        mapping.access = HostAccess::Detached(map_file(num_bytes)?);
        Ok(mapping)
    }

    /// Maps accessible addresses for a counting device. Its blocks may exceed the machine's memory, because few of their pages are ever
    /// touched. Tries smaller mappings if other counting devices use most addresses of the process.
    pub(super) fn counting() -> std::io::Result<Self> {
        map_or_halve(reservation_size(COUNTING_BYTES), |num_bytes| {
            map_private(num_bytes, ACCESS).or_else(|refused| {
                // With `vm.overcommit_memory = 2`, the system charges private writable pages when they are mapped, but pages of a file only
                // when they are touched. Extending a file beyond `ulimit -f` would kill the process.
                if getrlimit(Resource::Fsize).current.is_some() { Err(refused) } else { map_file(num_bytes) }
            })
        })
    }

    /// Wraps addresses of a GPU. None of them is accessible.
    pub(super) fn gpu(addresses: DeviceAddresses) -> Self {
        let start = NonNull::new(addresses.start() as *mut u8).expect("a GPU has no memory at address 0");
        let num_bytes = addresses.num_bytes();
        let mut mapping = Mapping::of(start, num_bytes);
        mapping.access = HostAccess::Gpu(addresses);
        mapping
    }

    fn of(start: NonNull<u8>, num_bytes: usize) -> Self {
        let (access, page_source) = (HostAccess::Shared, PageSource::Transparent);
        Mapping { start, num_bytes, access, page_source, pinning: None }
    }

    pub(super) fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    pub(super) fn page_source(&self) -> PageSource {
        self.page_source
    }

    /// Returns whether the host cannot access the memory.
    pub(super) fn is_detached(&self) -> bool {
        !matches!(self.access, HostAccess::Shared)
    }

    /// Returns the host's address of byte `offset`. Panics if it exceeds the mapping.
    pub(super) fn address(&self, offset: usize) -> NonNull<u8> {
        assert!(offset <= self.num_bytes, "byte {offset} of {}", self.num_bytes);
        // SAFETY: within the mapping, or at its end, by the line above.
        unsafe { self.start.add(offset) }
    }

    /// Returns the address at which kernels access the bytes that the host addresses by `start`. Panics if they exceed the mapping.
    pub(crate) fn translate(&self, start: NonNull<u8>, num_bytes: usize) -> NonNull<u8> {
        let offset = start.addr().get().checked_sub(self.start.addr().get());
        let offset =
            offset.filter(|offset| offset.checked_add(num_bytes).is_some_and(|end| end <= self.num_bytes));
        let offset = offset.expect("a kernel was given memory of another device, or of the host");
        let kernel_start = match &self.access {
            HostAccess::Detached(start) => *start,
            HostAccess::Shared | HostAccess::Gpu(_) => self.start,
        };
        // SAFETY: within the mapping by the line above.
        unsafe { kernel_start.add(offset) }
    }

    /// Makes the bytes `range` and possibly some after them accessible. Returns the end of the accessible bytes, which is rounded up to a
    /// huge page, so that no huge page is split there. Reserved huge pages are populated at once: if the host's pool were empty at the
    /// first touch, SIGBUS would kill the process.
    ///
    /// For memory of a GPU, takes memory from the driver.
    pub(super) fn make_accessible(&self, range: Range<usize>) -> std::io::Result<usize> {
        if let HostAccess::Gpu(addresses) = &self.access {
            return addresses.make_accessible(range).map_err(std::io::Error::other);
        }
        let address = self.start.addr().get();
        let end = ((address + range.end).next_multiple_of(HUGE_PAGE_BYTES) - address).min(self.num_bytes);
        let first = self.address(range.start).as_ptr().cast();
        // SAFETY: within the mapping; nothing accesses this memory before it is made accessible.
        unsafe { mprotect(first, end - range.start, MprotectFlags::READ | MprotectFlags::WRITE)? };
        if self.page_source == PageSource::Reserved {
            // SAFETY: as above; populating pages changes no byte.
            unsafe { madvise(first, end - range.start, Advice::LinuxPopulateWrite)? };
        }
        if let Some(pinning) = &self.pinning {
            pinning.pin(self.address(range.start), end - range.start);
        }
        Ok(end)
    }

    /// Returns the first error of pinning memory of the mapping.
    pub(crate) fn pinning_failure(&self) -> Option<&str> {
        self.pinning.as_ref()?.failure()
    }

    /// Returns `range`, shrunk to multiples of 64 KiB, to the system if it accepts the memory. The bytes then read as zeros. Keeps reserved
    /// huge pages, because other processes could take them before they are touched again, and pinned pages, which a GPU would go on to use.
    ///
    /// # Safety
    /// Nothing may read the bytes before writing them again.
    pub(super) unsafe fn discard(&self, range: Range<usize>) {
        let (start, end) = (
            range.start.next_multiple_of(RELEASE_GRANULARITY),
            range.end / RELEASE_GRANULARITY * RELEASE_GRANULARITY,
        );
        if start < end && self.page_source == PageSource::Transparent && self.pinning.is_none() {
            let first = self.address(start).as_ptr().cast();
            // SAFETY: within the mapping; the caller promises that nothing reads the bytes. If the system refuses, it keeps them.
            let _ = unsafe { madvise(first, end - start, Advice::LinuxDontNeed) };
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let starts = match &self.access {
            HostAccess::Shared => [Some(self.start), None],
            HostAccess::Detached(kernel_start) => [Some(self.start), Some(*kernel_start)],
            HostAccess::Gpu(_) => return,
        };
        drop(self.pinning.take());
        for start in starts.into_iter().flatten() {
            // SAFETY: mapped with this length. No block is left, because each holds the arena, and no kernel, because its processor holds
            // the mapping.
            let _ = unsafe { munmap(start.as_ptr().cast(), self.num_bytes) };
        }
    }
}

/// Maps `num_bytes` bytes. Halves the size until mapping succeeds.
fn map_or_halve(
    mut num_bytes: usize,
    map: impl Fn(usize) -> rustix::io::Result<NonNull<u8>>,
) -> std::io::Result<Mapping> {
    loop {
        match map(num_bytes) {
            Ok(start) => return Ok(Mapping::of(start, num_bytes)),
            Err(_) if num_bytes > RESERVATION_BYTES_MIN => {
                num_bytes = num_bytes / 2 / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Returns the size of this machine's memory in bytes, at least 1 GiB.
fn machine_bytes() -> usize {
    let system = rustix::system::sysinfo();
    (system.totalram as usize * system.mem_unit.max(1) as usize).max(1 << 30)
}

/// Returns the size of a mapping of up to `num_bytes`. Under `ulimit -v`, leaves addresses for the rest of the process.
fn reservation_size(num_bytes: usize) -> usize {
    let allowed =
        getrlimit(Resource::As).current.map_or(usize::MAX, |bytes| bytes as usize / ADDRESSES_DIVISOR);
    num_bytes.min(allowed) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
}

fn map_private(num_bytes: usize, access: ProtFlags) -> rustix::io::Result<NonNull<u8>> {
    let start = map_anonymous(num_bytes, access, MapFlags::empty())?;
    // Fewer TLB misses. A system without huge pages may refuse, which only costs speed.
    // SAFETY: the range has just been mapped.
    let _ = unsafe { madvise(start.as_ptr().cast(), num_bytes, Advice::LinuxHugepage) };
    Ok(start)
}

/// Maps anonymous memory, without committing it.
fn map_anonymous(num_bytes: usize, access: ProtFlags, more: MapFlags) -> rustix::io::Result<NonNull<u8>> {
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | more;
    // SAFETY: a new anonymous mapping at an address that the system chooses.
    let start = unsafe { mmap_anonymous(std::ptr::null_mut(), num_bytes, access, flags)? };
    Ok(NonNull::new(start.cast()).expect("the system maps nothing at address 0"))
}

/// Maps an anonymous file without pages.
fn map_file(num_bytes: usize) -> rustix::io::Result<NonNull<u8>> {
    let file = memfd_create(c"trireme-device", MemfdFlags::CLOEXEC)?;
    ftruncate(&file, num_bytes as u64)?;
    // SAFETY: a new mapping at an address that the system chooses. No other code has the file, which reads as zeros.
    let start = unsafe { mmap(std::ptr::null_mut(), num_bytes, ACCESS, MapFlags::SHARED, &file, 0)? };
    Ok(NonNull::new(start.cast()).expect("the system maps nothing at address 0"))
}
