//! Which transfers there are, how far they have come, and in which order their parts go to the system.

use crate::buffer::{AlignedBuffer, LentBuffer};
use crate::queue::Operation;
use crate::{Access, Direction, SwapError};
use slab::Slab;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Room for this many pending transfers from the start, so that it need not grow after the first steps.
const NUM_PENDING: usize = 256;

/// What a swap file has done so far.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct SwapStatistics {
    /// Bytes read from the file, rounded up to [`ALIGNMENT`](crate::ALIGNMENT) for each block.
    pub bytes_read: u64,
    /// Bytes written to the file, rounded likewise.
    pub bytes_written: u64,
    /// The time that callers spent in [`Transfer::wait`](crate::Transfer::wait), the sum over threads.
    pub waited: Duration,
    /// Memory of all buffers, those in use and those kept for the next transfers, in bytes.
    pub buffer_bytes: u64,
}

/// One block's place in the file, and what is known of its content.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) offset: u64,
    /// Its length as the owner sees it; in the file it is rounded up.
    pub(crate) bytes: usize,
    /// CRC-32C of each part, as last written.
    pub(crate) checksums: Box<[u32]>,
    /// A write was issued.
    pub(crate) is_written: bool,
    /// A transfer of it has begun and not ended.
    pub(crate) is_busy: bool,
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) blocks: Vec<Block>,
    slots: Slab<Slot>,
    /// Transfers that have not begun, in the order of issue.
    waiting: VecDeque<usize>,
    /// The transfer that has begun and of which there are parts to hand out.
    cutting: Option<usize>,
    /// What made the file useless.
    pub(crate) failure: Option<SwapError>,
    pub(crate) num_workers: usize,
    pub(crate) statistics: SwapStatistics,
}

struct Slot {
    direction: Direction,
    block: usize,
    phase: Phase,
    /// Nobody waits for the result.
    is_abandoned: bool,
}

enum Phase {
    Waiting(AlignedBuffer),
    Running(Running),
    /// Without a buffer if it failed.
    Ended(Option<AlignedBuffer>),
}

struct Running {
    buffer: LentBuffer,
    began: Instant,
    num_handed_out: usize,
    num_ended: usize,
}

impl State {
    pub(crate) fn new(blocks: Vec<Block>) -> Self {
        State {
            blocks,
            slots: Slab::with_capacity(NUM_PENDING),
            waiting: VecDeque::with_capacity(NUM_PENDING),
            ..State::default()
        }
    }

    /// Puts a transfer behind all others; its slot.
    pub(crate) fn enqueue(&mut self, direction: Direction, block: usize, buffer: AlignedBuffer) -> usize {
        self.blocks[block].is_written |= direction == Direction::Write;
        let slot = Slot { direction, block, phase: Phase::Waiting(buffer), is_abandoned: false };
        let index = self.slots.insert(slot);
        self.waiting.push_back(index);
        index
    }

    /// The next part of at most `part_bytes` that can go to the system: parts of one transfer one after the other,
    /// then the oldest transfer whose block has no other under way.
    pub(crate) fn next_operation(&mut self, part_bytes: usize) -> Option<Operation> {
        if self.failure.is_some() {
            return None;
        }
        let index = match self.cutting {
            Some(index) => index,
            None => self.begin()?,
        };
        let slot = &mut self.slots[index];
        let Phase::Running(running) = &mut slot.phase else { unreachable!("only running transfers are cut") };
        let part = running.buffer.memory.cut(part_bytes).expect("a transfer that is cut has parts left");
        let part_index = running.num_handed_out;
        running.num_handed_out += 1;
        self.cutting = (!running.buffer.memory.is_cut_up()).then_some(index);
        let block = &self.blocks[slot.block];
        let offset = block.offset + (part_index * part_bytes) as u64;
        let access = Access { direction: slot.direction, block: slot.block, offset, bytes: part.len() };
        Some(Operation { slot: index, part_index, access, checksum: block.checksums[part_index], part })
    }

    fn begin(&mut self) -> Option<usize> {
        let is_ready = |index: &usize| !self.blocks[self.slots[*index].block].is_busy;
        let position = self.waiting.iter().position(is_ready)?;
        let index = self.waiting.remove(position).expect("the position was just found");
        let slot = &mut self.slots[index];
        let Phase::Waiting(buffer) = std::mem::replace(&mut slot.phase, Phase::Ended(None)) else {
            unreachable!("a transfer that waits has its buffer")
        };
        let (buffer, began) = (buffer.lend(), Instant::now());
        slot.phase = Phase::Running(Running { buffer, began, num_handed_out: 0, num_ended: 0 });
        self.blocks[slot.block].is_busy = true;
        Some(index)
    }

    /// Takes note of a part that was moved as it should.
    pub(crate) fn record(&mut self, access: Access, part_index: usize, checksum: u32) {
        match access.direction {
            Direction::Read => self.statistics.bytes_read += access.bytes as u64,
            Direction::Write => {
                self.statistics.bytes_written += access.bytes as u64;
                self.blocks[access.block].checksums[part_index] = checksum;
            }
        }
    }

    /// Counts a part of the transfer in `index` as ended, well or not; whether that ended the transfer.
    pub(crate) fn end_part(&mut self, index: usize) -> bool {
        let Phase::Running(running) = &mut self.slots[index].phase else {
            unreachable!("a transfer runs until its last part has ended")
        };
        running.num_ended += 1;
        self.end_if_done(index)
    }

    /// Ends a running transfer of which the system has nothing, and will get nothing.
    fn end_if_done(&mut self, index: usize) -> bool {
        let has_failed = self.failure.is_some();
        let slot = &mut self.slots[index];
        let phase = std::mem::replace(&mut slot.phase, Phase::Ended(None));
        let is_done = |running: &Running| {
            running.num_ended == running.num_handed_out && (has_failed || running.buffer.memory.is_cut_up())
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

    /// Makes the file useless: what waits and what comes later fails with the first `failure`.
    pub(crate) fn fail(&mut self, failure: SwapError) {
        self.failure.get_or_insert(failure);
        while let Some(index) = self.waiting.pop_front() {
            self.slots[index].phase = Phase::Ended(None);
            if self.slots[index].is_abandoned {
                self.slots.remove(index);
            }
        }
        if let Some(index) = self.cutting.take() {
            self.end_if_done(index);
        }
    }

    /// The result of the transfer in `index`, whose slot is then free; none while it runs.
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

    /// Whether [`take_result`](State::take_result) would give one.
    pub(crate) fn is_done(&self, index: usize) -> bool {
        self.failure.is_some() || matches!(self.slots[index].phase, Phase::Ended(_))
    }

    /// Nobody will ask for the result of the transfer in `index`.
    pub(crate) fn abandon(&mut self, index: usize) {
        let slot = &mut self.slots[index];
        slot.is_abandoned = true;
        if let Phase::Ended(_) = slot.phase {
            self.slots.remove(index);
        }
    }

    /// The transfer that has been with the system for longest: when it began, and what it is as a whole.
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
