use crate::PageSize;
use rustix::fs::{SealFlags, fcntl_get_seals, fstat};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

/// Bytes of a huge page, which one page-table entry maps. It is aligned to its size, in memory and in the arena.
pub(super) const HUGE_PAGE: usize = PageSize::HUGE_BYTES;

/// Advice to `madvise`: collapse these bytes into huge pages now, unless the system denies them to shared memory (Linux 6.1).
const MADV_COLLAPSE: libc::c_int = 25;

/// An entire arena, mapped into this process.
pub(crate) struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping belongs to the process, not to a thread. The protocol of the parent module says which thread may access which part of
// it at what time.
unsafe impl Send for Mapping {}
// SAFETY: as above; the methods only compute addresses.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes of `memory`, if possible at an address aligned to [huge pages](HUGE_PAGE). A seal must guarantee that the
    /// file has at least this size.
    pub(super) fn new(memory: impl AsFd, len: usize) -> io::Result<Self> {
        let map = |near: *mut u8| {
            let protection = ProtFlags::READ | ProtFlags::WRITE;
            let flags = MapFlags::SHARED | MapFlags::NORESERVE;
            // SAFETY: `near` is only a hint: without `MAP_FIXED` the kernel replaces no mapping.
            let start = unsafe { mmap(near.cast(), len, protection, flags, memory.as_fd(), 0) }?;
            let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
            Ok::<_, io::Error>(Mapping { start, len })
        };
        let first = map(std::ptr::null_mut())?;
        let start = first.start.as_ptr();
        let excess = start.addr() % HUGE_PAGE;
        if excess == 0 {
            return Ok(first);
        }
        // The kernel assigns addresses downwards from the highest, so the addresses below are most likely free.
        drop(first);
        map(start.wrapping_sub(excess))
    }

    /// Maps `len` bytes that are not shared, and for which the kernel does not reserve memory.
    pub(super) fn private(len: usize) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), len, protection, flags) }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapping { start, len })
    }

    /// Asks the kernel to collapse `range`, which must be aligned to [huge pages](HUGE_PAGE), into huge pages: an access to a 4 KiB page
    /// that is not in the TLB costs several memory accesses to find the page. The bytes do not change, even while other threads access
    /// them.
    pub(super) fn make_huge(&self, range: Range<usize>) {
        // SAFETY: the range is mapped, and its bytes do not change. Success affects only speed.
        let _ =
            unsafe { libc::madvise(self.at(range.start, range.len()).cast(), range.len(), MADV_COLLAPSE) };
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The address of `len` bytes at `offset`.
    ///
    /// # Panics
    /// If they are not all inside the mapping.
    pub(super) fn at(&self, offset: usize, len: usize) -> *mut u8 {
        assert!(
            offset <= self.len && len <= self.len - offset,
            "{len} bytes at {offset} are inside an arena"
        );
        self.start.as_ptr().wrapping_add(offset)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` or `private`, and references into it do not outlive `self`.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}

#[derive(Clone)]
pub(crate) struct PeerArena(pub(crate) Arc<Mapping>);

impl PeerArena {
    /// Maps the memory that a peer sent, if it is an arena of at least `num_bytes`.
    pub(crate) fn map(memory: &OwnedFd, num_bytes: usize) -> io::Result<Self> {
        let refuse = |what| Err(io::Error::new(io::ErrorKind::InvalidData, what));
        if !fcntl_get_seals(memory)?.contains(SealFlags::SHRINK) {
            return refuse("the peer could shrink its memory under this process");
        }
        match usize::try_from(fstat(memory)?.st_size) {
            Ok(len) if len >= num_bytes => Ok(PeerArena(Arc::new(Mapping::new(memory, len)?))),
            _ => refuse("the peer's memory is too small for an arena"),
        }
    }
}
