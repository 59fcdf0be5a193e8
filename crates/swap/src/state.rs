//! The pending transfers of a swap file, their progress, and the order in which their parts are submitted to the system.

use crate::buffer::{AlignedBuffer, LentBuffer};
use crate::queue::Operation;
use crate::{Access, Direction, SwapError};
use slab::Slab;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Number of pending transfers that memory is reserved for at creation, so that later steps do not allocate.
const PENDING_CAPACITY: usize = 256;

/// Counters of a swap file since its creation.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SwapStatistics {
    /// Bytes read from the file. Each block counts rounded up to [`ALIGNMENT`](crate::ALIGNMENT).
    pub bytes_read: u64,
    /// Bytes written to the file. Each block counts rounded up to [`ALIGNMENT`](crate::ALIGNMENT).
    pub bytes_written: u64,
    /// Time that callers spent in [`Transfer::wait`](crate::Transfer::wait), summed over threads.
    pub waited: Duration,
    /// Memory of all buffers in bytes, in use or kept for reuse.
    pub buffer_bytes: u64,
}

/// The location of a block in the file, and the state of its content.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) offset: u64,
    /// Length for callers. In the file it is rounded up.
    pub(crate) bytes: usize,
    /// CRC-32C of each part when it was last written.
    pub(crate) checksums: Box<[u32]>,
    /// Whether a write was issued.
    pub(crate) is_written: bool,
    /// Whether a transfer of the block is running.
    pub(crate) is_busy: bool,
}

#[derive(Default)]
pub(crate) struct QueueState {
    pub(crate) blocks: Vec<Block>,
    slots: Slab<Slot>,
    /// Transfers that have not started, in the order of issue.
    waiting: VecDeque<usize>,
    /// The running transfer that still has parts to submit.
    submitting: Option<usize>,
    /// The first failure, after which the file is unusable.
    pub(crate) failure: Option<SwapError>,
    pub(crate) num_workers: usize,
    pub(crate) statistics: SwapStatistics,
}

struct Slot {
    direction: Direction,
    block: usize,
    phase: Phase,
    /// Whether the caller no longer needs the result.
    is_abandoned: bool,
}

enum Phase {
    Waiting(AlignedBuffer),
    Running(RunningTransfer),
    /// `None` if the transfer failed.
    Ended(Option<AlignedBuffer>),
}

struct RunningTransfer {
    buffer: LentBuffer,
    began: Instant,
    num_submitted: usize,
    num_ended: usize,
}

impl QueueState {
    pub(crate) fn new(blocks: Vec<Block>) -> Self {
        QueueState {
            blocks,
            slots: Slab::with_capacity(PENDING_CAPACITY),
            waiting: VecDeque::with_capacity(PENDING_CAPACITY),
            ..QueueState::default()
        }
    }

    /// Appends a transfer to the waiting ones, and returns its slot.
    pub(crate) fn enqueue(&mut self, direction: Direction, block: usize, buffer: AlignedBuffer) -> usize {
        self.blocks[block].is_written |= direction == Direction::Write;
        let slot = Slot { direction, block, phase: Phase::Waiting(buffer), is_abandoned: false };
        let index = self.slots.insert(slot);
        self.waiting.push_back(index);
        index
    }

    /// Returns the next operation, a part of at most `part_bytes`. The parts of one transfer are returned consecutively. The next transfer
    /// is the oldest one whose block is not busy.
    pub(crate) fn next_operation(&mut self, part_bytes: usize) -> Option<Operation> {
        if self.failure.is_some() {
            return None;
        }
        let index = match self.submitting {
            Some(index) => index,
            None => self.start_next_transfer()?,
        };
        let slot = &mut self.slots[index];
        let Phase::Running(running) = &mut slot.phase else { unreachable!("only running transfers are cut") };
        let part =
            running.buffer.memory.split_off(part_bytes).expect("a transfer that is cut has parts left");
        let part_index = running.num_submitted;
        running.num_submitted += 1;
        self.submitting = (!running.buffer.memory.is_fully_split()).then_some(index);
        let block = &self.blocks[slot.block];
        let offset = block.offset + (part_index * part_bytes) as u64;
        let access = Access { direction: slot.direction, block: slot.block, offset, bytes: part.len() };
        Some(Operation { slot: index, part_index, access, checksum: block.checksums[part_index], part })
    }

    fn start_next_transfer(&mut self) -> Option<usize> {
        let is_ready = |index: &usize| !self.blocks[self.slots[*index].block].is_busy;
        let position = self.waiting.iter().position(is_ready)?;
        let index = self.waiting.remove(position).expect("the position was just found");
        let slot = &mut self.slots[index];
        let Phase::Waiting(buffer) = std::mem::replace(&mut slot.phase, Phase::Ended(None)) else {
            unreachable!("a transfer that waits has its buffer")
        };
        let (buffer, began) = (buffer.lend(), Instant::now());
        slot.phase = Phase::Running(RunningTransfer { buffer, began, num_submitted: 0, num_ended: 0 });
        self.blocks[slot.block].is_busy = true;
        Some(index)
    }

    /// Records a part that was moved successfully.
    pub(crate) fn record(&mut self, access: Access, part_index: usize, checksum: u32) {
        match access.direction {
            Direction::Read => self.statistics.bytes_read += access.bytes as u64,
            Direction::Write => {
                self.statistics.bytes_written += access.bytes as u64;
                self.blocks[access.block].checksums[part_index] = checksum;
            }
        }
    }

    /// Counts a part of the transfer in slot `index` as ended, successful or not. Returns whether this ended the transfer.
    pub(crate) fn end_part(&mut self, index: usize) -> bool {
        let Phase::Running(running) = &mut self.slots[index].phase else {
            unreachable!("a transfer runs until its last part has ended")
        };
        running.num_ended += 1;
        self.end_if_done(index)
    }

    /// Ends a running transfer if none of its parts are in flight and no more will be submitted. Returns whether it ended.
    fn end_if_done(&mut self, index: usize) -> bool {
        let has_failed = self.failure.is_some();
        let slot = &mut self.slots[index];
        let phase = std::mem::replace(&mut slot.phase, Phase::Ended(None));
        let is_done = |running: &RunningTransfer| {
            running.num_ended == running.num_submitted
                && (has_failed || running.buffer.memory.is_fully_split())
        };
        let running = match phase {
            Phase::Running(running) if is_done(&running) => running,
            other => {
                slot.phase = other;
                return false;
            }
        };
        let buffer = running.buffer.reclaim().expect("who ends a part has dropped it");
        slot.phase = Phase::Ended((!has_failed).then_some(buffer));
        self.blocks[slot.block].is_busy = false;
        if slot.is_abandoned {
            self.slots.remove(index);
        }
        true
    }

    /// Makes the file unusable: waiting and later transfers fail with the first `failure`.
    pub(crate) fn fail(&mut self, failure: SwapError) {
        self.failure.get_or_insert(failure);
        while let Some(index) = self.waiting.pop_front() {
            self.slots[index].phase = Phase::Ended(None);
            if self.slots[index].is_abandoned {
                self.slots.remove(index);
            }
        }
        if let Some(index) = self.submitting.take() {
            self.end_if_done(index);
        }
    }

    /// Returns the result of the transfer in slot `index`, or `None` while the transfer is pending. The slot must not be used after its
    /// result was returned. After a failure of the file, a pending transfer fails at once.
    pub(crate) fn take_result(&mut self, index: usize) -> Option<Result<AlignedBuffer, SwapError>> {
        let slot = &mut self.slots[index];
        if let Phase::Ended(buffer) = &mut slot.phase
            && let Some(buffer) = buffer.take()
        {
            self.slots.remove(index);
            return Some(Ok(buffer));
        }
        let failure = self.failure.clone()?;
        self.abandon(index);
        Some(Err(failure))
    }

    /// Returns whether [`take_result`](QueueState::take_result) would return a result.
    pub(crate) fn is_done(&self, index: usize) -> bool {
        self.failure.is_some() || matches!(self.slots[index].phase, Phase::Ended(_))
    }

    /// Gives up the result of the transfer in slot `index`. The slot is released once the transfer has ended.
    pub(crate) fn abandon(&mut self, index: usize) {
        let slot = &mut self.slots[index];
        slot.is_abandoned = true;
        if let Phase::Ended(_) = slot.phase {
            self.slots.remove(index);
        }
    }

    /// Returns the start time of the running transfer that started first, and an access that describes its full block.
    pub(crate) fn oldest_running(&self) -> Option<(Instant, Access)> {
        let running = self.slots.iter().filter_map(|(_, slot)| match &slot.phase {
            Phase::Running(running) => Some((running.began, slot)),
            _ => None,
        });
        let (began, slot) = running.min_by_key(|(began, _)| *began)?;
        let Block { offset, bytes, .. } = self.blocks[slot.block];
        let bytes = bytes.next_multiple_of(crate::ALIGNMENT);
        Some((began, Access { direction: slot.direction, block: slot.block, offset, bytes }))
    }
}
