use crate::buffer::Pool;
use crate::method::{self, Choice};
use crate::queue::Queue;
use crate::state::Block;
use crate::{
    ALIGNMENT, AlignedBuffer, Direction, Method, SwapError, SwapOptions, SwapStatistics, Transfer, space,
    workers,
};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use trireme_base::Bytes;

/// A file of blocks, each of a length of its own, that are written and read as a whole.
///
/// Transfers of one block take place in the order of issue: a read sees the last write that was issued before
/// it. Transfers of different blocks are independent. Once one has failed the file is of no use: what is
/// pending and what comes later fails in the same way.
///
/// The file has no name, so nothing is left behind, however the process ends. Dropping it abandons what has not
/// begun and waits for the rest, unless the disk hangs.
pub struct SwapFile {
    queue: Arc<Queue>,
    pool: Arc<Pool>,
    description: SwapDescription,
    threads: Vec<JoinHandle<()>>,
}

/// Where a swap file is, and how it is served. Its text is one line, for a notice to the user.
#[derive(Debug, Clone)]
pub struct SwapDescription {
    /// The folder.
    pub folder: PathBuf,
    /// The space taken on the disk.
    pub size: Bytes,
    /// Whether the disk cannot fill up before all blocks are written. Not every file system can promise that.
    pub is_reserved: bool,
    /// How bytes get to the disk and back.
    pub method: Method,
    /// The faster methods that were tried, and why they do not work here.
    pub refused: Vec<(Method, String)>,
}

impl fmt::Display for SwapDescription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a swap file of {} in {}, using {}", self.size, self.folder.display(), self.method)?;
        for (method, reason) in &self.refused {
            write!(f, "; no {method}: {reason}")?;
        }
        if !self.is_reserved {
            write!(f, "; its space is not reserved, because the file system cannot do that")?;
        }
        Ok(())
    }
}

impl SwapFile {
    /// A file in `folder` with a block for each of `block_bytes`, whose space on disk is taken at once: the sum,
    /// each rounded up to [`ALIGNMENT`]. Blocks of no bytes are allowed.
    ///
    /// # Errors
    /// Options that cannot be, a folder where no file can be made, or too little space there.
    pub fn create(
        folder: &Path,
        block_bytes: &[usize],
        options: &SwapOptions,
    ) -> Result<SwapFile, SwapError> {
        options.validate()?;
        let size = file_size(block_bytes)?;
        let (file, is_reserved) = space::create(folder, size)?;
        let blocks = lay_out(block_bytes, options.part_bytes);
        let fail = |source| SwapError::Create { folder: folder.to_owned(), source: Arc::new(source) };
        let Choice { method, ring, refused } = method::choose(&file, options).map_err(fail)?;
        let queue = Arc::new(Queue::new(folder.to_owned(), blocks, options));
        let (folder, size) = (folder.to_owned(), Bytes(size));
        let description = SwapDescription { folder, size, is_reserved, method, refused };
        // From here on a drop ends the threads that were started.
        let mut swap = SwapFile { queue, pool: Arc::default(), description, threads: Vec::new() };
        swap.threads = workers::start(&swap.queue, file, ring, options.num_threads)
            .map_err(|source| SwapError::Start { source: Arc::new(source) })?;
        Ok(swap)
    }

    /// A buffer of `len` bytes, with unspecified content. Those that were dropped are used again, by capacity.
    ///
    /// # Errors
    /// There is no memory.
    pub fn buffer(&self, len: usize) -> Result<AlignedBuffer, SwapError> {
        self.pool.take(len)
    }

    /// Issues a write of `block`, which gets the buffer's bytes. Never blocks; a failure is seen by waiting.
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

    /// Issues a read of `block` into the buffer, whose length becomes the block's. Never blocks; a failure is seen
    /// by waiting.
    ///
    /// # Panics
    /// If there is no such block, no write of it was issued, or the buffer's capacity is less than its length.
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

    /// What was chosen, and why nothing better.
    pub fn describe(&self) -> &SwapDescription {
        &self.description
    }

    /// What was moved so far.
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
            // A panic of a thread has failed the file, and who waited has seen it.
            self.threads.drain(..).for_each(|thread| drop(thread.join()));
        }
    }
}

/// The sum of all blocks, each rounded up; at least one unit, for trying what works.
fn file_size(block_bytes: &[usize]) -> Result<u64, SwapError> {
    let add = |size: u64, bytes: &usize| {
        // Positions in a file are signed.
        let taken = bytes.checked_next_multiple_of(ALIGNMENT)?;
        size.checked_add(taken as u64).filter(|size| i64::try_from(*size).is_ok())
    };
    let size = block_bytes.iter().try_fold(0, add);
    size.map(|size| size.max(ALIGNMENT as u64))
        .ok_or_else(|| SwapError::Options { what: "the blocks of a swap file exceed 8EiB".to_owned() })
}

/// The blocks, one after the other.
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
