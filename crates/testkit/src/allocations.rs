#![allow(unsafe_code)]

use rustix::process::getpid;
use rustix::thread::gettid;
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

/// An allocator that calls the system's allocator and counts the allocations of all threads except the main thread. The test harness
/// allocates on the main thread when it reports tests that take longer than a minute. For a test binary's `#[global_allocator]`.
#[derive(Debug)]
pub struct CountingAllocator {
    num_allocations: AtomicU64,
}

impl CountingAllocator {
    /// Returns an allocator whose count is zero.
    pub const fn new() -> Self {
        CountingAllocator { num_allocations: AtomicU64::new(0) }
    }

    /// Number of allocations and reallocations since the start.
    pub fn num_allocations(&self) -> u64 {
        self.num_allocations.load(Ordering::Relaxed)
    }

    fn count(&self) {
        let is_of_main = gettid() == getpid();
        self.num_allocations.fetch_add(u64::from(!is_of_main), Ordering::Relaxed);
    }
}

impl Default for CountingAllocator {
    fn default() -> Self {
        CountingAllocator::new()
    }
}

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.count();
        // SAFETY: the caller upholds the contract of this trait, which the system's allocator shares.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        self.count();
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, new_size) }
    }
}
