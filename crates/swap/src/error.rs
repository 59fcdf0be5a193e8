use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use trireme_base::Bytes;

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From disk to memory.
    Read,
    /// From memory to disk.
    Write,
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Direction::Read => "read",
            Direction::Write => "write",
        })
    }
}

/// One piece of a swap file that was read or written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access {
    /// Which way.
    pub direction: Direction,
    /// The block's index.
    pub block: usize,
    /// Where the piece begins, in bytes from the start of the file.
    pub offset: u64,
    /// Its length in bytes, a multiple of [`ALIGNMENT`](crate::ALIGNMENT).
    pub bytes: usize,
}

/// The piece's block and place, without the direction.
impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block {} ({} bytes at byte {})", self.block, self.bytes, self.offset)
    }
}

/// Why blocks cannot be kept on disk. Cheap to clone: the failure of one transfer is also that of all after it.
#[derive(Debug, Clone, thiserror::Error)]
pub enum SwapError {
    /// Options that cannot be.
    #[error("{what}")]
    Options {
        /// What is wrong, and what is allowed.
        what: String,
    },
    /// No file could be made.
    #[error("cannot create a swap file in {}; it must be a folder on a disk where this user may write", folder.display())]
    Create {
        /// Where.
        folder: PathBuf,
        /// Why not.
        #[source]
        source: Arc<io::Error>,
    },
    /// The disk has too little space, or does not give it.
    #[error(
        "cannot reserve {asked} for the swap file in {}: only {free} are free; free space there, choose a folder on \
         another disk, or offload less to disk", folder.display()
    )]
    Space {
        /// Where.
        folder: PathBuf,
        /// How much was asked for.
        asked: Bytes,
        /// How much this user could have.
        free: Bytes,
        /// What the system said.
        #[source]
        source: Arc<io::Error>,
    },
    /// There is no memory for a buffer.
    #[error("cannot allocate {bytes} of memory for a transfer; use smaller blocks, or fewer at a time")]
    Memory {
        /// How much was asked for.
        bytes: Bytes,
        /// Why not.
        #[source]
        source: Arc<io::Error>,
    },
    /// A thread could not be started.
    #[error("cannot start a thread for the swap file")]
    Start {
        /// Why not.
        #[source]
        source: Arc<io::Error>,
    },
    /// The system refused a read or a write.
    #[error(
        "cannot {} {access} of the swap file in {}; look for disk errors in the kernel log (dmesg), or choose a \
         folder on another disk", access.direction, folder.display()
    )]
    Refused {
        /// What was read or written.
        access: Access,
        /// Where the file is.
        folder: PathBuf,
        /// What the system said.
        #[source]
        source: Arc<io::Error>,
    },
    /// The system moved fewer bytes than asked.
    #[error(
        "the {} of {access} of the swap file in {} ended after {moved} bytes; was the file truncated, or is the disk \
         full? Look at the kernel log (dmesg), or choose a folder on another disk",
        access.direction, folder.display()
    )]
    Short {
        /// What was read or written.
        access: Access,
        /// How many bytes were.
        moved: usize,
        /// Where the file is.
        folder: PathBuf,
    },
    /// A block came back other than it was written.
    #[error(
        "{access} of the swap file in {} changed on disk: its checksum (CRC-32C) was {expected:08x}, but is now \
         {found:08x}; do not trust this disk, and choose a folder on another one", folder.display()
    )]
    Corrupted {
        /// What was read.
        access: Access,
        /// The checksum when it was written.
        expected: u32,
        /// The checksum of what was read.
        found: u32,
        /// Where the file is.
        folder: PathBuf,
    },
    /// A transfer took too long.
    #[error(
        "the {} of {access} of the swap file in {} has not finished after {timeout:?}; does the disk hang? Look at \
         the kernel log (dmesg), choose a folder on another disk, or allow more time", access.direction, folder.display()
    )]
    Timeout {
        /// What was read or written.
        access: Access,
        /// Where the file is.
        folder: PathBuf,
        /// The time it had.
        timeout: Duration,
    },
    /// io_uring itself failed.
    #[error(
        "io_uring failed for the swap file in {}; choose a method that uses threads", folder.display()
    )]
    Ring {
        /// Where the file is.
        folder: PathBuf,
        /// What the system said.
        #[source]
        source: Arc<io::Error>,
    },
    /// A thread of the file panicked.
    #[error("a thread serving the swap file in {} panicked; see its message", folder.display())]
    Panicked {
        /// Where the file is.
        folder: PathBuf,
    },
    /// The file was dropped while the transfer was pending.
    #[error("the swap file in {} was closed before the transfer ended", folder.display())]
    Closed {
        /// Where the file was.
        folder: PathBuf,
    },
}
