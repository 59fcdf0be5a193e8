//! Blocks of bytes that live on disk while they are not needed: the disk tier of offloading.
//!
//! A [`SwapFile`] has a fixed list of blocks. [`SwapFile::write`] takes an [`AlignedBuffer`] by value and
//! gives a [`Transfer`]; waiting for it gives the buffer back. Transfers run in the background, several at
//! once, each cut into parts, so that the device always has a queue to work on. Where the system allows it they
//! bypass the page cache and go through io_uring; [`SwapFile::describe`] says what was possible.
//! (Rajbhandari et al., "ZeRO-Infinity", 2021, sections 5 and 6.)
//!
//! A disk is not to be trusted: its space is taken before the first transfer, what comes back is compared with
//! a checksum that stayed in memory, and no wait outlasts [`SwapOptions::timeout`] on a disk that hangs.
//!
//! The crate knows bytes and files, and nothing of tensors.

mod bandwidth;
mod buffer;
mod error;
mod file;
mod method;
mod options;
mod queue;
mod raw;
mod space;
mod spilled;
mod state;
mod transfer;
mod workers;

pub use bandwidth::{Bandwidth, measure_bandwidth};
pub use buffer::AlignedBuffer;
pub use error::{Access, Direction, SwapError};
pub use file::{SwapDescription, SwapFile};
pub use options::{Interceptor, Method, SwapOptions};
pub use spilled::SpilledMemory;
pub use state::SwapStatistics;
pub use transfer::Transfer;

/// What memory, lengths and positions in the file are multiples of, as direct IO demands: at least a sector
/// of any usual disk, and a page.
pub const ALIGNMENT: usize = 4096;
