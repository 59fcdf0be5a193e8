//! The size of the pages of shared memory.

use trireme_base::HUGE_PAGE_BYTES;

/// The size of the pages in which memory lies that ranks share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageSize {
    /// The system's, mostly 4 KiB: a process maps what it touches.
    Base,
    /// 2 MiB, where the system has such pages for shared memory (Linux 6.1). A process that touches a byte maps the whole page, but long vectors
    /// that are exchanged many times in a step take less time, because one cached entry maps 2 MiB.
    Huge,
}

impl PageSize {
    /// Bytes of a huge page.
    pub const HUGE_BYTES: usize = HUGE_PAGE_BYTES;
}
