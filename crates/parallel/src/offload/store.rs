use super::{OffloadOptions, VisitMemory, try_each};
use crate::error::Result;
use crate::memory::CountedMemory;
use std::collections::VecDeque;
use trireme_base::{AsyncOperation, Journal, JournalEntry, Pending};
use trireme_schedule::Tier;
use trireme_swap::{AlignedBuffer, SwapFile, Transfer};
use trireme_tensor::{Category, Device, DeviceError, PinnedMemory, View, ViewMut};

/// Maximum number of chunks being written to a disk. More would hold memory that eviction should free.
const WRITES_MAX: usize = 4;

/// Maximum bytes of a chunk: enough for the full speed of a disk, and small compared with a worker's memory.
const CHUNK_BYTES_MAX: usize = 16 << 20;

/// The blocks of one class of state that reside off their device between uses.
pub(crate) struct Store {
    /// The device whose kernels use the state.
    owner: Device,
    backing: Backing,
    blocks: Vec<BlockState>,
    /// Host memory that pending copies may still read. It is freed before more is allocated, so that memory use does not depend on timing.
    pending_copies: Vec<Pending<PinnedMemory>>,
}

enum Backing {
    /// Host memory. Only activations move there.
    Host(Device),
    Disk(Box<Disk>),
}

#[derive(Default)]
enum BlockState {
    /// In memory of the owner.
    #[default]
    Resident,
    /// In host memory, or being copied there.
    OnHost(Pending<PinnedMemory>),
    OnDisk,
    /// Being read from disk.
    Reading,
    /// In memory of the owner, with an unchanged copy on the disk.
    ResidentAndStored,
}

/// Blocks in a file, split into chunks. While one chunk of a block is written, the next one is copied from the device; while one is read,
/// the one before is copied to the device. Writes use the memory of a few chunks, whatever the size of a block. A read uses buffers for all
/// chunks of its block.
struct Disk {
    /// Counts the chunks in flight, which are in host memory.
    counted: CountedMemory,
    /// If the host is a counting device, there is no file.
    options: OffloadOptions,
    /// The device whose kernels use the state.
    owner: Device,
    /// Maximum bytes of each block.
    bytes_max: Vec<usize>,
    /// Current bytes of each block.
    num_bytes: Vec<usize>,
    /// Bytes of a full chunk and of its buffer. Set with `file` and `first_chunks` when the first block is written.
    chunk_bytes: Option<usize>,
    file: Option<SwapFile>,
    first_chunks: Vec<usize>,
    writes: VecDeque<Transfer>,
    /// For each block, its chunks that are being read.
    reads: Vec<VecDeque<Transfer>>,
    /// For each block, the number of its pending read in the journal of a counting device.
    journal_reads: Vec<Option<usize>>,
}

impl Disk {
    fn new(options: &OffloadOptions, owner: &Device, num_blocks: usize) -> Self {
        Disk {
            counted: CountedMemory::new(&options.host),
            options: options.clone(),
            owner: owner.clone(),
            bytes_max: vec![0; num_blocks],
            num_bytes: vec![0; num_blocks],
            chunk_bytes: None,
            file: None,
            first_chunks: Vec::new(),
            writes: VecDeque::with_capacity(WRITES_MAX + 1),
            reads: (0..num_blocks).map(|_| VecDeque::new()).collect(),
            journal_reads: vec![None; num_blocks],
        }
    }

    fn chunk_bytes(&self) -> usize {
        self.chunk_bytes.expect("a block was written before")
    }

    /// Returns the total size in bytes of the buffers into which a block is read.
    fn read_bytes(&self, block: usize) -> usize {
        self.num_bytes[block].next_multiple_of(self.chunk_bytes())
    }

    /// Chooses the chunk size, counts the memory of writes, and creates the file unless the host is a counting device.
    fn create(&mut self) -> Result<()> {
        let longest = self.bytes_max.iter().copied().max().unwrap_or(0);
        let chunk_bytes = AlignedBuffer::capacity_for(longest.min(CHUNK_BYTES_MAX));
        let mut chunks = Vec::new();
        for &room in &self.bytes_max {
            self.first_chunks.push(chunks.len());
            chunks.extend((0..room).step_by(chunk_bytes).map(|start| chunk_bytes.min(room - start)));
        }
        // The chunks being written, and the one being filled.
        let num_writes = (WRITES_MAX + 1).min(chunks.len());
        self.counted.charge(Category::Communication, num_writes * chunk_bytes)?;
        self.chunk_bytes = Some(chunk_bytes);
        if !self.options.host.is_counting() {
            self.file = Some(SwapFile::create(&self.options.folder, &chunks, &self.options.swap)?);
        }
        Ok(())
    }

    /// Copies a block to chunk buffers, starts to write them, and frees the block's memory.
    fn write(&mut self, block: usize, memory: VisitMemory<'_>) -> Result<()> {
        let (num_bytes, room) = (num_bytes(memory), self.bytes_max[block]);
        assert!(num_bytes <= room, "{num_bytes} bytes for block {block}, which has room for {room}");
        self.num_bytes[block] = num_bytes;
        if self.chunk_bytes.is_none() {
            self.create()?;
        }
        if self.options.host.is_counting() {
            if let Some(journal) = self.options.host.journal() {
                journal.issue(AsyncOperation::DiskWrite { bytes: num_bytes });
            }
            memory(&mut |part| part.release());
            return Ok(());
        }
        let chunk_bytes = self.chunk_bytes();
        let Disk { file, first_chunks, writes, owner, .. } = self;
        let file = file.as_ref().expect("it was made above");
        let mut chunk = first_chunks[block];
        let (mut copied, mut open) = (0, None);
        let mut copy = |memory: View<'_>| -> Result<()> {
            let mut first = 0;
            while first < memory.num_bytes() {
                let mut buffer = match open.take() {
                    Some(buffer) => buffer,
                    None => {
                        await_write_slot(writes)?;
                        let mut buffer = file.buffer(chunk_bytes)?;
                        buffer.set_len(chunk_bytes.min(room - copied));
                        buffer
                    }
                };
                let free = &mut buffer[copied % chunk_bytes..];
                let len = free.len().min(memory.num_bytes() - first);
                owner.download(memory.part(first, [len].into()), &mut free[..len])?;
                let is_full = len == free.len();
                (first, copied) = (first + len, copied + len);
                if is_full || copied == num_bytes {
                    writes.push_back(file.write(chunk, buffer));
                    chunk += 1;
                } else {
                    open = Some(buffer);
                }
            }
            Ok(())
        };
        try_each(memory, |part| {
            copy(part.view_mut().as_view().as_bytes())?;
            part.release();
            Ok(())
        })
    }

    fn read(&mut self, block: usize) -> Result<()> {
        self.counted.charge(Category::Communication, self.read_bytes(block))?;
        if self.options.host.is_counting() {
            let issue =
                |journal: &Journal| journal.issue(AsyncOperation::DiskRead { bytes: self.num_bytes[block] });
            self.journal_reads[block] = self.options.host.journal().map(issue);
            return Ok(());
        }
        let chunk_bytes = self.chunk_bytes();
        let file = self.file.as_ref().expect("a block is read after it was written");
        let num_chunks = self.num_bytes[block].div_ceil(chunk_bytes);
        let first = self.first_chunks[block];
        for chunk in first..first + num_chunks {
            self.reads[block].push_back(file.read(chunk, file.buffer(chunk_bytes)?));
        }
        Ok(())
    }

    /// Allocates `memory` again, and copies the chunks of a block there as they are read.
    fn finish_read(&mut self, block: usize, memory: VisitMemory<'_>) -> Result<()> {
        let finished = if self.options.host.is_counting() {
            if let (Some(journal), Some(number)) =
                (self.options.host.journal(), self.journal_reads[block].take())
            {
                journal.record(JournalEntry::Await(number));
            }
            try_each(memory, |part| part.reallocate())
        } else {
            self.copy_read(block, memory)
        };
        self.counted.uncharge(Category::Communication, self.read_bytes(block));
        finished
    }

    fn copy_read(&mut self, block: usize, memory: VisitMemory<'_>) -> Result<()> {
        let chunk_bytes = self.chunk_bytes();
        let (reads, owner) = (&mut self.reads[block], &self.owner);
        let (mut copied, mut open) = (0, None::<AlignedBuffer>);
        let mut copy = |mut memory: ViewMut<'_>| -> Result<()> {
            let mut first = 0;
            while first < memory.num_bytes() {
                let buffer = match open.take() {
                    Some(buffer) => buffer,
                    None => reads.pop_front().expect("chunks make up the block").wait()?,
                };
                let left = &buffer[copied % chunk_bytes..];
                let len = left.len().min(memory.num_bytes() - first);
                owner.upload(&left[..len], memory.reborrow().into_part(first, [len].into()));
                let is_read = len == left.len();
                (first, copied) = (first + len, copied + len);
                open = (!is_read).then_some(buffer);
            }
            Ok(())
        };
        try_each(memory, |part| {
            part.reallocate()?;
            copy(part.view_mut().into_bytes())
        })
    }
}

/// Waits until fewer than [`WRITES_MAX`] writes are in flight, and removes completed writes from the front.
fn await_write_slot(writes: &mut VecDeque<Transfer>) -> Result<()> {
    while writes.len() >= WRITES_MAX || writes.front().is_some_and(Transfer::is_done) {
        writes.pop_front().expect("a write is in flight").wait()?;
    }
    Ok(())
}

fn num_bytes(memory: VisitMemory<'_>) -> usize {
    let mut sum = 0;
    memory(&mut |part| sum += part.num_bytes());
    sum
}

/// Copies all of `memory` from the device to the host, and frees it. Kernels continue meanwhile.
fn copy_out(owner: &Device, memory: VisitMemory<'_>, copy: PinnedMemory) -> Pending<PinnedMemory> {
    let (mut first, mut copy) = (0, Pending::new(copy));
    memory(&mut |part| {
        owner.download_async(part.view_mut().as_view(), &mut copy, first);
        first += part.num_bytes();
        part.release();
    });
    copy
}

/// Allocates all of `memory` on the device again, and copies its contents back.
fn copy_in(owner: &Device, memory: VisitMemory<'_>, copy: &mut Pending<PinnedMemory>) -> Result<()> {
    let mut first = 0;
    try_each(memory, |part| {
        part.reallocate()?;
        owner.upload_async(copy, first, part.view_mut());
        first += part.num_bytes();
        Ok(())
    })?;
    owner.wait_for(&copy.event());
    Ok(())
}

impl Store {
    pub(crate) fn new(tier: Tier, options: &OffloadOptions, owner: &Device, num_blocks: usize) -> Self {
        let backing = match tier {
            Tier::Device | Tier::Host => Backing::Host(options.host.clone()),
            Tier::Disk => Backing::Disk(Box::new(Disk::new(options, owner, num_blocks))),
        };
        let blocks = (0..num_blocks).map(|_| BlockState::default()).collect();
        Store { owner: owner.clone(), backing, blocks, pending_copies: Vec::new() }
    }

    pub(crate) fn declare_size(&mut self, block: usize, num_bytes: usize) {
        if let Backing::Disk(disk) = &mut self.backing {
            disk.bytes_max[block] = num_bytes;
        }
    }

    pub(crate) fn evict(&mut self, block: usize, has_changed: bool, memory: VisitMemory<'_>) -> Result<()> {
        let state = &mut self.blocks[block];
        *state = match (&mut self.backing, std::mem::take(state)) {
            (Backing::Host(host), _) => {
                for copy in self.pending_copies.drain(..) {
                    copy.event().outcome().map_err(DeviceError::Failed)?;
                }
                let copy = host.pinned_memory(num_bytes(memory), Category::Activations)?;
                BlockState::OnHost(copy_out(&self.owner, memory, copy))
            }
            (Backing::Disk(_), BlockState::ResidentAndStored) if !has_changed => {
                memory(&mut |part| part.release());
                BlockState::OnDisk
            }
            (Backing::Disk(disk), _) => {
                disk.write(block, memory)?;
                BlockState::OnDisk
            }
        };
        Ok(())
    }

    pub(crate) fn fetch(&mut self, block: usize) -> Result<()> {
        if let (Backing::Disk(disk), BlockState::OnDisk) = (&mut self.backing, &self.blocks[block]) {
            disk.read(block)?;
            self.blocks[block] = BlockState::Reading;
        }
        Ok(())
    }

    pub(crate) fn restore(&mut self, block: usize, memory: VisitMemory<'_>) -> Result<()> {
        self.fetch(block)?;
        let state = &mut self.blocks[block];
        *state = match (&mut self.backing, std::mem::take(state)) {
            (Backing::Disk(disk), BlockState::Reading) => {
                disk.finish_read(block, memory)?;
                BlockState::ResidentAndStored
            }
            (Backing::Host(_), BlockState::OnHost(mut copy)) => {
                copy_in(&self.owner, memory, &mut copy)?;
                // If kernels can access host memory, the copy has completed, and its memory is freed at once.
                if !self.owner.reaches_host() {
                    self.pending_copies.push(copy);
                }
                BlockState::Resident
            }
            (_, here) => here,
        };
        Ok(())
    }

    /// The file of the disk, if anything was written to it.
    pub(crate) fn file(&self) -> Option<&SwapFile> {
        if let Backing::Disk(disk) = &self.backing { disk.file.as_ref() } else { None }
    }
}
