//! Stores blocks of bytes on disk while they are not needed: the disk tier of offloading (Rajbhandari et al., "ZeRO-Infinity", 2021,
//! sections 5 and 6).
//!
//! A [`SwapFile`] has a fixed list of blocks. [`SwapFile::write`] takes an [`AlignedBuffer`] by value and returns a [`Transfer`]. Waiting
//! for the transfer returns the buffer. Transfers run in the background, several at a time. Each is split into parts, so that the device
//! always has a queue of requests. If the system allows it, transfers bypass the page cache and use io_uring. [`SwapFile::description`]
//! reports the method in use.
//!
//! The crate assumes that disks fail. Space is reserved before the first transfer, data that is read is compared with a checksum kept in
//! memory, and waiting ends after [`SwapOptions::timeout`] even if the disk hangs.
//!
//! The crate handles bytes and files, and has no notion of tensors.

mod bandwidth;
mod buffer;
mod error;
mod file;
mod file_backed_memory;
mod method;
mod options;
mod queue;
mod raw;
mod state;
mod transfer;
mod unnamed_file;
mod workers;

pub use bandwidth::{Bandwidth, measure_bandwidth};
pub use buffer::AlignedBuffer;
pub use error::{Access, Direction, SwapError};
pub use file::{SwapDescription, SwapFile};
pub use file_backed_memory::FileBackedMemory;
pub use options::{Interceptor, IoMethod, SwapOptions};
pub use state::SwapStatistics;
pub use transfer::Transfer;

/// Alignment in bytes of buffers, lengths and file offsets, as direct IO requires. 4096 covers a page, and a sector of any common disk.
pub const ALIGNMENT: usize = 4096;
