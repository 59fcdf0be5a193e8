use rustix::fs::{SealFlags, fcntl_get_seals, fstat};
use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

/// The kernel can map so many bytes by one entry, if they begin at a multiple of so many, here and in the arena.
pub(super) const HUGE_PAGE: usize = 2 << 20;

/// Advice to `madvise`: make huge pages of these now, unless the system denies them to shared memory (Linux 6.1).
const MADV_COLLAPSE: libc::c_int = 25;

/// A whole arena, mapped into this process.
pub(crate) struct Mapping {
    start: NonNull<u8>,
    len: usize,
    /// What is unmapped in the end.
    addresses: (NonNull<u8>, usize),
}

// SAFETY: a mapping is memory of the process, not of a thread; who may touch which part of it when is the
// protocol of this module's parent.
unsafe impl Send for Mapping {}
// SAFETY: as above; the methods only compute addresses.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes of `memory`, whose size is sealed to be at least that, where [huge pages](HUGE_PAGE) can begin.
    pub(super) fn new(memory: impl AsFd, len: usize) -> io::Result<Self> {
        let len_with_gaps = len.checked_add(HUGE_PAGE).ok_or(io::ErrorKind::OutOfMemory)?;
        let mut mapping = Mapping::anonymous(len_with_gaps, ProtFlags::empty())?;
        let gap = mapping.start.as_ptr().align_offset(HUGE_PAGE);
        let start = mapping.at(gap, len);
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: the addresses are those of `mapping`, which nobody uses.
        let start = match unsafe { mmap(start.cast(), len, protection, flags, memory, 0) } {
            Ok(start) => start,
            Err(refused) => {
                // The kernel may have unmapped the addresses before it refused, and others may have them by now.
                std::mem::forget(mapping);
                return Err(refused.into());
            }
        };
        mapping.start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        mapping.len = len;
        Ok(mapping)
    }

    /// Maps `len` bytes that no peer maps, and for which the kernel sets no memory aside.
    pub(super) fn private(len: usize) -> io::Result<Self> {
        Mapping::anonymous(len, ProtFlags::READ | ProtFlags::WRITE)
    }

    fn anonymous(len: usize, protection: ProtFlags) -> io::Result<Self> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), len, protection, flags) }?;
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Mapping { start, len, addresses: (start, len) })
    }

    /// Asks the kernel to move the `len` bytes from `offset` on to huge pages: a page of 4 KiB that left the caches costs several accesses to
    /// memory to be found again. The bytes stay as they are, even while others use them. What is longer than a huge page ends with small ones,
    /// which take no more memory than it has bytes; shorter buffers share a huge page.
    pub(super) fn make_huge(&self, offset: usize, len: usize) {
        let start = offset / HUGE_PAGE * HUGE_PAGE;
        let end = match len {
            ..HUGE_PAGE => (offset + len).next_multiple_of(HUGE_PAGE).min(self.len),
            _ => (offset + len) / HUGE_PAGE * HUGE_PAGE,
        };
        if start < end {
            // SAFETY: the range is mapped, and its bytes do not change. Whether the kernel does it changes speed only.
            let _ = unsafe { libc::madvise(self.at(start, end - start).cast(), end - start, MADV_COLLAPSE) };
        }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The address of `len` bytes from `offset` on.
    ///
    /// # Panics
    /// If they are not all inside.
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
        let (start, len) = self.addresses;
        // SAFETY: mapped by `new` or `private`, and references into it do not outlive `self`.
        let unmapped = unsafe { munmap(start.as_ptr().cast(), len) };
        debug_assert!(unmapped.is_ok(), "{unmapped:?}");
    }
}

/// The arena of a peer.
#[derive(Clone)]
pub(crate) struct PeerArena(pub(crate) Arc<Mapping>);

impl PeerArena {
    /// Maps what a peer sent, if it is an arena of at least `num_bytes`.
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
