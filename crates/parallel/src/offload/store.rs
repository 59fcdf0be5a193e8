use super::{Memory, OffloadOptions, Tier};
use crate::error::ParallelError;
use std::collections::VecDeque;
use std::path::PathBuf;
use trireme_base::DType;
use trireme_schedule::StateClass;
use trireme_swap::{SwapFile, SwapOptions, Transfer};
use trireme_tensor::{Category, Device, Tensor};

/// Blocks on their way to a disk at a time; more would hold memory that was to be freed.
const WRITES_MAX: usize = 4;

/// Blocks of state that live elsewhere.
pub(crate) struct Store {
    place: Place,
    blocks: Vec<Block>,
}

enum Place {
    Host { host: Device, category: Category },
    Disk(Disk),
}

#[derive(Default)]
enum Block {
    /// With its owner.
    #[default]
    Here,
    /// In the host's memory, whether its owner has a copy or not.
    InMemory { copy: Tensor, is_away: bool },
    /// On the disk.
    OnDisk,
    /// On its way back from it.
    Reading(Transfer),
    /// With its owner, and unchanged on the disk.
    Copied,
}

struct Disk {
    folder: PathBuf,
    options: SwapOptions,
    /// Made when the first block comes.
    file: Option<SwapFile>,
    num_bytes: Vec<usize>,
    writes: VecDeque<Transfer>,
}

impl Disk {
    /// Copies a block and starts to write it.
    fn write(&mut self, block: usize, memory: Memory<'_>) -> Result<(), ParallelError> {
        let len = num_bytes(memory);
        if self.file.is_none() {
            // Blocks of which nothing was said are like this one: activations of one kind of units.
            self.num_bytes.iter_mut().filter(|bytes| **bytes == usize::MAX).for_each(|bytes| *bytes = len);
        }
        while self.writes.len() >= WRITES_MAX || self.writes.front().is_some_and(Transfer::is_done) {
            self.writes.pop_front().expect("a write is under way").wait()?;
        }
        let len_max = self.len_max();
        let file = self.file()?;
        let mut buffer = file.buffer(len_max)?;
        buffer.set_len(len);
        copy_out(memory, &mut buffer);
        let transfer = file.write(block, buffer);
        self.writes.push_back(transfer);
        Ok(())
    }

    fn read(&mut self, block: usize) -> Result<Transfer, ParallelError> {
        let len_max = self.len_max();
        let file = self.file()?;
        Ok(file.read(block, file.buffer(len_max)?))
    }

    /// Buffers of the longest block serve all.
    fn len_max(&self) -> usize {
        self.num_bytes.iter().copied().max().unwrap_or(0)
    }

    fn file(&mut self) -> Result<&SwapFile, ParallelError> {
        Ok(match &mut self.file {
            Some(file) => file,
            none => none.insert(SwapFile::create(&self.folder, &self.num_bytes, &self.options)?),
        })
    }
}

fn num_bytes(memory: Memory<'_>) -> usize {
    let mut sum = 0;
    memory(&mut |part| sum += part.num_bytes());
    sum
}

/// Copies all of `memory` and gives it back.
fn copy_out(memory: Memory<'_>, mut target: &mut [u8]) {
    memory(&mut |part| {
        let (own, rest) = std::mem::take(&mut target).split_at_mut(part.num_bytes());
        own.copy_from_slice(part.bytes());
        part.release();
        target = rest;
    });
}

/// Takes all of `memory` again, and copies it back.
fn copy_in(memory: Memory<'_>, mut source: &[u8]) -> Result<(), ParallelError> {
    let mut refused = None;
    memory(&mut |part| {
        let (own, rest) = source.split_at(part.num_bytes());
        match part.restore() {
            Ok(()) => part.bytes_mut().copy_from_slice(own),
            Err(error) => refused = Some(error),
        }
        source = rest;
    });
    refused.map_or(Ok(()), Err)
}

impl Store {
    pub(crate) fn new(class: StateClass, options: &OffloadOptions, tier: Tier, num_blocks: usize) -> Self {
        let category = match class {
            StateClass::Optimizer => Category::Optimizer,
            StateClass::Parameters => Category::Parameters,
            StateClass::Gradients => Category::Gradients,
            StateClass::Activations => Category::Activations,
        };
        let place = match tier {
            Tier::Device | Tier::Host => Place::Host { host: options.host.clone(), category },
            Tier::Disk => Place::Disk(Disk {
                folder: options.folder.clone(),
                options: options.swap.clone(),
                file: None,
                num_bytes: vec![0; num_blocks],
                writes: VecDeque::with_capacity(WRITES_MAX + 1),
            }),
        };
        Store { place, blocks: (0..num_blocks).map(|_| Block::default()).collect() }
    }

    /// Says how many bytes a block has; `usize::MAX` makes it as long as the first one that comes.
    pub(crate) fn expect(&mut self, block: usize, num_bytes: usize) {
        if let Place::Disk(disk) = &mut self.place {
            disk.num_bytes[block] = num_bytes;
        }
    }

    pub(crate) fn evict(
        &mut self,
        block: usize,
        has_changed: bool,
        memory: Memory<'_>,
    ) -> Result<(), ParallelError> {
        let state = &mut self.blocks[block];
        *state = match (&mut self.place, std::mem::take(state)) {
            (Place::Host { host, category }, found) => {
                let mut copy = match found {
                    Block::InMemory { copy, .. } => copy,
                    _ => host.empty([num_bytes(memory)].into(), DType::U8, *category)?,
                };
                if has_changed {
                    copy_out(memory, copy.bytes_mut())
                } else {
                    memory(&mut |part| part.release())
                }
                Block::InMemory { copy, is_away: true }
            }
            (Place::Disk(_), Block::Copied) if !has_changed => {
                memory(&mut |part| part.release());
                Block::OnDisk
            }
            (Place::Disk(disk), _) => {
                disk.write(block, memory)?;
                Block::OnDisk
            }
        };
        Ok(())
    }

    pub(crate) fn fetch(&mut self, block: usize) -> Result<(), ParallelError> {
        if let (Place::Disk(disk), Block::OnDisk) = (&mut self.place, &self.blocks[block]) {
            self.blocks[block] = Block::Reading(disk.read(block)?);
        }
        Ok(())
    }

    pub(crate) fn restore(&mut self, block: usize, memory: Memory<'_>) -> Result<(), ParallelError> {
        self.fetch(block)?;
        let state = &mut self.blocks[block];
        *state = match std::mem::take(state) {
            Block::Reading(transfer) => {
                copy_in(memory, &transfer.wait()?)?;
                Block::Copied
            }
            Block::InMemory { copy, is_away } => {
                if is_away {
                    copy_in(memory, copy.bytes())?;
                }
                Block::InMemory { copy, is_away: false }
            }
            here => here,
        };
        Ok(())
    }

    pub(crate) fn describe(&self) -> Option<String> {
        match &self.place {
            Place::Disk(Disk { file: Some(file), .. }) => Some(file.describe().to_string()),
            _ => None,
        }
    }

    pub(crate) fn disk_bytes(&self) -> [u64; 2] {
        match &self.place {
            Place::Disk(Disk { file: Some(file), .. }) => {
                let statistics = file.statistics();
                [statistics.bytes_read, statistics.bytes_written]
            }
            _ => [0, 0],
        }
    }
}
