use crate::buffer::Pool;
use crate::method::{self, SelectedMethod};
use crate::queue::Queue;
use crate::state::Block;
use crate::{
    ALIGNMENT, AlignedBuffer, Direction, IoMethod, SwapError, SwapOptions, SwapStatistics, Transfer,
    unnamed_file, workers,
};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use trireme_base::Bytes;

/// A file of blocks with individual lengths. A block is always read or written as a whole.
///
/// Transfers of one block run in the order of issue: a read returns the last write that was issued before it. Transfers of different blocks
/// are independent. After the first failure the file is unusable: all pending and later transfers fail with the same error.
///
/// The file has no name, so nothing remains on disk, however the process ends. Dropping the file fails all pending transfers. It waits
/// until the system has finished the parts in flight, but no longer than the timeout of a transfer.
pub struct SwapFile {
    queue: Arc<Queue>,
    pool: Arc<Pool>,
    description: SwapDescription,
    threads: Vec<JoinHandle<()>>,
}

/// The location, size and method of a swap file. [`Display`](fmt::Display) formats the description on one line, for a notice to the user.
#[derive(Debug, Clone)]
pub struct SwapDescription {
    /// The folder whose disk stores the file.
    pub folder: PathBuf,
    /// Size of the file.
    pub size: Bytes,
    /// Whether the space on disk is reserved, so that writes cannot run out of space. Not every file system supports this.
    pub is_reserved: bool,
    /// The method of the file's reads and writes.
    pub method: IoMethod,
    /// The faster methods that were tried, with the reason why each is not available.
    pub unavailable: Vec<(IoMethod, String)>,
}

impl fmt::Display for SwapDescription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a swap file of {} in {}, using {}", self.size, self.folder.display(), self.method)?;
        for (method, reason) in &self.unavailable {
            write!(f, "; no {method}: {reason}")?;
        }
        if !self.is_reserved {
            write!(f, "; its space is not reserved, because the file system cannot do that")?;
        }
        Ok(())
    }
}

impl SwapFile {
    /// Creates a swap file in `folder` with one block for each length in `block_bytes`.
    ///
    /// Reserves the space on disk: the sum of all lengths, each rounded up to [`ALIGNMENT`]. Blocks may be empty. Starts the threads that
    /// serve the file.
    ///
    /// # Errors
    /// If the options or the lengths are invalid, if no file can be created in the folder or the disk has too little space, or if a thread
    /// cannot be started.
    pub fn create(
        folder: &Path,
        block_bytes: &[usize],
        options: &SwapOptions,
    ) -> Result<SwapFile, SwapError> {
        options.validate()?;
        let size = file_size(block_bytes)?;
        let (file, is_reserved) = unnamed_file::create(folder, size)?;
        let blocks = lay_out(block_bytes, options.part_bytes);
        let fail = |source| SwapError::Create { folder: folder.to_owned(), source: Arc::new(source) };
        let SelectedMethod { method, ring, unavailable: refused } =
            method::choose(&file, options).map_err(fail)?;
        let queue = Arc::new(Queue::new(folder.to_owned(), blocks, options));
        let (folder, size) = (folder.to_owned(), Bytes(size));
        let description = SwapDescription { folder, size, is_reserved, method, unavailable: refused };
        // From here on, dropping the swap file ends the threads that were started.
        let mut swap = SwapFile { queue, pool: Arc::default(), description, threads: Vec::new() };
        swap.threads = workers::start(&swap.queue, file, ring, options.num_threads)
            .map_err(|source| SwapError::SpawnThread { source: Arc::new(source) })?;
        Ok(swap)
    }

    /// Returns a buffer of `len` bytes with unspecified content. Reuses the memory of a dropped buffer of the same capacity.
    ///
    /// # Errors
    /// If memory cannot be allocated.
    pub fn buffer(&self, len: usize) -> Result<AlignedBuffer, SwapError> {
        self.pool.take(len)
    }

    /// Issues a write of the buffer's bytes to `block`. Does not wait for the disk. [`Transfer::wait`] reports failures.
    ///
    /// # Panics
    /// If there is no such block, or the buffer's length is not the block's.
    pub fn write(&self, block: usize, buffer: AlignedBuffer) -> Transfer {
        let (bytes, _) = self.queue.block(block);
        assert_eq!(
            buffer.len(),
            bytes,
            "block {block} of the swap file and the buffer have different lengths"
        );
        self.issue(Direction::Write, block, buffer)
    }

    /// Issues a read of `block` into the buffer, whose length is set to that of the block. Does not wait for the disk. [`Transfer::wait`]
    /// reports failures.
    ///
    /// # Panics
    /// If there is no such block, no write of it was issued, or the block is longer than the buffer's capacity.
    pub fn read(&self, block: usize, mut buffer: AlignedBuffer) -> Transfer {
        let (bytes, is_written) = self.queue.block(block);
        assert!(is_written || bytes == 0, "block {block} of the swap file was never written");
        buffer.set_len(bytes);
        self.issue(Direction::Read, block, buffer)
    }

    fn issue(&self, direction: Direction, block: usize, buffer: AlignedBuffer) -> Transfer {
        if buffer.is_empty() {
            return Transfer::ready(Ok(buffer));
        }
        match self.queue.submit(direction, block, buffer) {
            Ok(slot) => Transfer::pending(&self.queue, slot),
            Err(failure) => Transfer::ready(Err(failure)),
        }
    }

    /// Returns the location, size and method of the file, with the reasons why faster methods are not available.
    pub fn description(&self) -> &SwapDescription {
        &self.description
    }

    /// Returns the bytes moved so far, the time spent waiting, and the memory of buffers.
    pub fn statistics(&self) -> SwapStatistics {
        SwapStatistics { buffer_bytes: self.pool.bytes(), ..self.queue.statistics() }
    }
}

impl fmt::Debug for SwapFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SwapFile").field("description", &self.description).finish_non_exhaustive()
    }
}

impl Drop for SwapFile {
    fn drop(&mut self) {
        if self.queue.close() {
            // If a thread panicked, the file has failed, and waiting callers have received that error.
            self.threads.drain(..).for_each(|thread| drop(thread.join()));
        }
    }
}

/// Returns the size of the file: the sum of all lengths, each rounded up to a multiple of [`ALIGNMENT`]. The size is at least
/// [`ALIGNMENT`], because the choice of a method tries a transfer of that length.
fn file_size(block_bytes: &[usize]) -> Result<u64, SwapError> {
    let add = |size: u64, bytes: &usize| {
        // Offsets in a file are signed.
        let rounded = bytes.checked_next_multiple_of(ALIGNMENT)?;
        size.checked_add(rounded as u64).filter(|size| i64::try_from(*size).is_ok())
    };
    let size = block_bytes.iter().try_fold(0, add);
    size.map(|size| size.max(ALIGNMENT as u64))
        .ok_or_else(|| SwapError::Options { what: "the blocks of a swap file exceed 8EiB".to_owned() })
}

/// Places the blocks one after another.
fn lay_out(block_bytes: &[usize], part_bytes: usize) -> Vec<Block> {
    let mut offset = 0;
    let place = |bytes: &usize| {
        let checksums = vec![0; bytes.div_ceil(part_bytes)].into();
        let block = Block { offset, bytes: *bytes, checksums, is_written: false, is_busy: false };
        offset += bytes.next_multiple_of(ALIGNMENT) as u64;
        block
    };
    block_bytes.iter().map(place).collect()
}
