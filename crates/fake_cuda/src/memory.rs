//! Device memory: pages that the host cannot access while no job runs.

use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags, madvise, mmap_anonymous, mprotect, munmap};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::ops::Range;

/// Granularity of device memory, as on GPUs.
pub const GRANULARITY: usize = 2 << 20;

/// Addresses and pages of a GPU.
#[derive(Debug, Default)]
pub(crate) struct DeviceMemory {
    /// Reserved addresses: start and size.
    reserved: BTreeMap<usize, usize>,
    /// Physical memory: handle and size.
    pages: BTreeMap<u64, usize>,
    num_handles: u64,
    /// Addresses with memory: start, and the size with whether access is allowed.
    mapped: BTreeMap<usize, (usize, bool)>,
    is_open: bool,
}

impl DeviceMemory {
    /// Bytes of physical memory in use.
    pub(crate) fn used_bytes(&self) -> usize {
        self.pages.values().sum()
    }

    pub(crate) fn reserve(&mut self, num_bytes: usize) -> Option<usize> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address that the system chooses.
        let start = unsafe { mmap_anonymous(std::ptr::null_mut(), num_bytes, ProtFlags::empty(), flags) };
        let start = start.ok()?;
        // Access is allowed and taken for each call of the driver, which takes long for many small pages. Best effort.
        // SAFETY: the mapping from above.
        let _ = unsafe { madvise(start, num_bytes, Advice::LinuxHugepage) };
        let start = start as usize;
        self.reserved.insert(start, num_bytes);
        Some(start)
    }

    /// Frees reserved addresses. Returns false if they are not reserved, or have memory.
    pub(crate) fn free_addresses(&mut self, start: usize, num_bytes: usize) -> bool {
        let is_mapped = self.mapped.range(start..start + num_bytes).next().is_some();
        if is_mapped || self.reserved.get(&start) != Some(&num_bytes) {
            return false;
        }
        self.reserved.remove(&start);
        // SAFETY: reserved with this size by `reserve`; the program has given it up.
        unsafe { munmap(start as *mut c_void, num_bytes) }.is_ok()
    }

    /// Takes physical memory. Returns its handle.
    pub(crate) fn create(&mut self, num_bytes: usize) -> u64 {
        self.num_handles += 1;
        self.pages.insert(self.num_handles, num_bytes);
        self.num_handles
    }

    /// Frees physical memory, which must not be mapped.
    pub(crate) fn release(&mut self, handle: u64) -> bool {
        self.pages.remove(&handle).is_some()
    }

    /// Maps memory to reserved addresses, without access.
    pub(crate) fn map(&mut self, start: usize, num_bytes: usize, handle: u64) -> bool {
        let is_reserved =
            self.reserved.iter().any(|(&first, &size)| first <= start && start + num_bytes <= first + size);
        let is_free = self.overlapping(start..start + num_bytes).next().is_none();
        let fits = self.pages.get(&handle) == Some(&num_bytes);
        let can_map = is_reserved && is_free && fits;
        if can_map {
            self.mapped.insert(start, (num_bytes, false));
        }
        can_map
    }

    pub(crate) fn unmap(&mut self, start: usize, num_bytes: usize) -> bool {
        let spans: Vec<usize> = self.overlapping(start..start + num_bytes).collect();
        self.mapped.retain(|start, _| !spans.contains(start));
        !spans.is_empty()
    }

    /// Allows access of kernels, and fills the memory with NaN.
    pub(crate) fn allow(&mut self, start: usize, num_bytes: usize) -> bool {
        let Some((size, is_allowed)) = self.mapped.get_mut(&start) else { return false };
        if *size != num_bytes {
            return false;
        }
        *is_allowed = true;
        protect(start..start + num_bytes, true);
        // SAFETY: reserved, mapped and writable since the line above; the driver's lock is held.
        unsafe { std::slice::from_raw_parts_mut(start as *mut u8, num_bytes).fill(u8::MAX) };
        protect(start..start + num_bytes, self.is_open);
        true
    }

    /// Returns the starts of mapped spans that overlap addresses.
    fn overlapping(&self, addresses: Range<usize>) -> impl Iterator<Item = usize> {
        let spans = self.mapped.iter();
        let overlaps = move |&(&start, &(size, _)): &(&usize, &(usize, bool))| {
            start < addresses.end && addresses.start < start + size
        };
        spans.filter(overlaps).map(|(start, _)| *start)
    }

    /// Returns whether jobs may access all these bytes.
    pub(crate) fn contains(&self, start: usize, num_bytes: usize) -> bool {
        let (mut at, end) = (start, start + num_bytes);
        while at < end {
            match self.mapped.range(..=at).next_back() {
                Some((&first, &(size, true))) if at < first + size => at = first + size,
                _ => return false,
            }
        }
        true
    }

    /// Lets the host access device memory, or no longer: it can only while jobs run.
    pub(crate) fn set_open(&mut self, is_open: bool) {
        if self.is_open == is_open {
            return;
        }
        self.is_open = is_open;
        for (&start, &(size, is_allowed)) in &self.mapped {
            if is_allowed {
                protect(start..start + size, is_open);
            }
        }
    }
}

fn protect(addresses: Range<usize>, is_accessible: bool) {
    let access =
        if is_accessible { MprotectFlags::READ | MprotectFlags::WRITE } else { MprotectFlags::empty() };
    // SAFETY: mapped by `reserve`; only jobs access this memory, and they run when it is accessible.
    unsafe { mprotect(addresses.start as *mut c_void, addresses.len(), access) }
        .expect("the system allows access to its own mappings");
}
