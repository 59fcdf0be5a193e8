use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use trireme_base::Bytes;

trireme_base::named! {
    /// The direction of a transfer.
    pub enum Direction {
        /// From disk to memory.
        Read = "read",
        /// From memory to disk.
        Write = "write",
    }
}

/// A contiguous range of a block that is read or written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access {
    /// The direction of the access.
    pub direction: Direction,
    /// Index of the block.
    pub block: usize,
    /// Offset in bytes from the start of the file.
    pub offset: u64,
    /// Length in bytes, a multiple of [`ALIGNMENT`](crate::ALIGNMENT).
    pub bytes: usize,
}

/// Formats the block and the byte range, without the direction.
impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block {} ({} bytes at byte {})", self.block, self.bytes, self.offset)
    }
}

/// An error of a swap file. Cheap to clone: the first failure of a file is also the result of all later transfers.
#[derive(Debug, Clone, thiserror::Error)]
#[expect(missing_docs, reason = "messages explain the fields")]
pub enum SwapError {
    /// The options or the block sizes are invalid.
    #[error("{what}")]
    Options { what: String },
    /// The file could not be created.
    #[error("cannot create a swap file in {}; it must be a folder on a disk where this user may write", folder.display())]
    Create { folder: PathBuf, source: Arc<io::Error> },
    /// The disk has too little free space, or refused to reserve it.
    #[error(
        "cannot reserve {asked} for the swap file in {}: only {free} are free; free space there, choose a folder on \
         another disk, or offload less to disk", folder.display()
    )]
    Space { folder: PathBuf, asked: Bytes, free: Bytes, source: Arc<io::Error> },
    /// A buffer could not be allocated.
    #[error("cannot allocate {bytes} of memory for a transfer; use smaller blocks, or fewer at a time")]
    Memory { bytes: Bytes, source: Arc<io::Error> },
    /// A thread could not be started.
    #[error("cannot start a thread for the swap file")]
    SpawnThread { source: Arc<io::Error> },
    /// The system refused a read or a write.
    #[error(
        "cannot {} {access} of the swap file in {}; look for disk errors in the kernel log (dmesg), or choose a \
         folder on another disk", access.direction, folder.display()
    )]
    Io { access: Access, folder: PathBuf, source: Arc<io::Error> },
    /// The system moved fewer bytes than asked.
    #[error(
        "the {} of {access} of the swap file in {} ended after {moved} bytes; was the file truncated, or is the disk \
         full? Look at the kernel log (dmesg), or choose a folder on another disk",
        access.direction, folder.display()
    )]
    Short { access: Access, moved: usize, folder: PathBuf },
    /// The checksum of a block that was read differs from the block's checksum when it was written.
    #[error(
        "{access} of the swap file in {} changed on disk: its checksum (CRC-32C) was {expected:08x}, but is now \
         {found:08x}; do not trust this disk, and choose a folder on another one", folder.display()
    )]
    Corrupted { access: Access, expected: u32, found: u32, folder: PathBuf },
    /// A transfer exceeded its timeout.
    #[error(
        "the {} of {access} of the swap file in {} has not finished after {timeout:?}; does the disk hang? Look at \
         the kernel log (dmesg), choose a folder on another disk, or allow more time", access.direction, folder.display()
    )]
    Timeout { access: Access, folder: PathBuf, timeout: Duration },
    /// io_uring failed.
    #[error("io_uring failed for the swap file in {}; choose a method that uses threads", folder.display())]
    Ring { folder: PathBuf, source: Arc<io::Error> },
    /// A thread of the swap file panicked.
    #[error("a thread serving the swap file in {} panicked; see its message", folder.display())]
    Panicked { folder: PathBuf },
    /// The file was dropped while the transfer was pending.
    #[error("the swap file in {} was closed before the transfer ended", folder.display())]
    Closed { folder: PathBuf },
}
