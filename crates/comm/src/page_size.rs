//! The size of the pages of shared memory.

use trireme_base::HUGE_PAGE_BYTES;

/// The size of the pages of memory that ranks share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageSize {
    /// The system's page size, mostly 4 KiB. A process maps only the pages that it accesses.
    Base,
    /// 2 MiB pages, if the system has them for shared memory (Linux 6.1). A process that accesses a byte maps the whole page. Long vectors
    /// that are exchanged many times per step are faster, because one TLB entry covers 2 MiB.
    Huge,
}

impl PageSize {
    /// Bytes of a huge page.
    pub const HUGE_BYTES: usize = HUGE_PAGE_BYTES;
}
