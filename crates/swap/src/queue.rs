//! State shared by the callers of a swap file and the threads that serve it.

use crate::buffer::AlignedBuffer;
use crate::raw::MemoryPart;
use crate::state::{Block, QueueState};
use crate::{Access, Direction, SwapError, SwapOptions, SwapStatistics};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

pub(crate) struct Queue {
    pub(crate) folder: PathBuf,
    options: SwapOptions,
    state: Mutex<QueueState>,
    /// Signals workers that an operation may be available, or that the file has failed.
    submitted: Condvar,
    /// Signals callers that a transfer or a worker has ended, or that the file has failed.
    ended: Condvar,
}

/// A part of a transfer, which the system reads or writes.
#[derive(Debug)]
pub(crate) struct Operation {
    pub(crate) slot: usize,
    pub(crate) part_index: usize,
    pub(crate) access: Access,
    /// CRC-32C of the part. For a read, the expected value. For a write, [`with_checksum`](Operation::with_checksum) computes it.
    pub(crate) checksum: u32,
    pub(crate) part: MemoryPart,
}

impl Queue {
    pub(crate) fn new(folder: PathBuf, blocks: Vec<Block>, options: &SwapOptions) -> Self {
        Queue {
            folder,
            options: options.clone(),
            state: Mutex::new(QueueState::new(blocks)),
            submitted: Condvar::new(),
            ended: Condvar::new(),
        }
    }

    /// Issues a transfer of a full block and returns its slot, or the failure of the file.
    pub(crate) fn submit(
        &self,
        direction: Direction,
        block: usize,
        buffer: AlignedBuffer,
    ) -> Result<usize, SwapError> {
        let mut state = self.lock();
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        let slot = state.enqueue(direction, block, buffer);
        drop(state);
        self.submitted.notify_all();
        Ok(slot)
    }

    /// Returns the length of a block in bytes, and whether a write of it was issued.
    pub(crate) fn block(&self, block: usize) -> (usize, bool) {
        let state = self.lock();
        let Block { bytes, is_written, .. } = state.blocks[block];
        (bytes, is_written)
    }

    pub(crate) fn statistics(&self) -> SwapStatistics {
        self.lock().statistics
    }

    /// Blocks until the transfer in `slot` has ended. Fails the file if the oldest running transfer exceeds its timeout first.
    pub(crate) fn wait(&self, slot: usize) -> Result<AlignedBuffer, SwapError> {
        let began = Instant::now();
        let mut state = self.lock();
        loop {
            let remaining = self.expire(&mut state);
            if let Some(result) = state.take_result(slot) {
                state.statistics.waited += began.elapsed();
                return result;
            }
            state = self.wait_for_end(state, remaining);
        }
    }

    pub(crate) fn is_done(&self, slot: usize) -> bool {
        let mut state = self.lock();
        self.expire(&mut state);
        state.is_done(slot)
    }

    pub(crate) fn abandon(&self, slot: usize) {
        self.lock().abandon(slot);
    }

    /// Fails the file if the oldest running transfer has exceeded its timeout. Returns the time that remains until then.
    fn expire(&self, state: &mut QueueState) -> Duration {
        let Some((began, access)) = state.oldest_running() else { return self.options.timeout };
        let remaining = self.options.timeout.saturating_sub(began.elapsed());
        if remaining.is_zero() && state.failure.is_none() {
            let (folder, timeout) = (self.folder.clone(), self.options.timeout);
            self.fail(state, SwapError::Timeout { access, folder, timeout });
        }
        remaining
    }

    /// Blocks until an operation is available, and returns it with its checksum. Returns `None` once the file is closed or has failed.
    pub(crate) fn next(&self) -> Option<Operation> {
        let mut state = self.lock();
        loop {
            if let Some(operation) = state.next_operation(self.options.part_bytes) {
                drop(state);
                return Some(operation.with_checksum());
            }
            if state.failure.is_some() {
                return None;
            }
            state = self.submitted.wait(state).expect("no thread panics while it holds the queue");
        }
    }

    /// Returns the next operation with its checksum, or `None` if none is available now.
    pub(crate) fn try_next(&self) -> Option<Operation> {
        let operation = self.lock().next_operation(self.options.part_bytes)?;
        Some(operation.with_checksum())
    }

    /// Records the result of an operation.
    pub(crate) fn end(&self, operation: Operation, result: io::Result<usize>) {
        let result = match &self.options.interceptor {
            Some(interceptor) => interceptor.result(&operation.access, result),
            None => result,
        };
        let checked = self.check_result(&operation, result);
        let Operation { slot, part_index, access, checksum, part } = operation;
        // A transfer can get its buffer back only after all its parts are dropped.
        drop(part);
        let mut state = self.lock();
        match checked {
            Ok(()) => state.record(access, part_index, checksum),
            Err(failure) => self.fail(&mut state, failure),
        }
        if state.end_part(slot) {
            self.ended.notify_all();
            // Another transfer of the same block may have been waiting for this one.
            self.submitted.notify_all();
        }
    }

    fn check_result(&self, operation: &Operation, result: io::Result<usize>) -> Result<(), SwapError> {
        let Operation { access, checksum: expected, ref part, .. } = *operation;
        let folder = || self.folder.clone();
        let refused = |source| SwapError::Io { access, folder: folder(), source: Arc::new(source) };
        let moved = result.map_err(refused)?;
        if moved != access.bytes {
            return Err(SwapError::Short { access, moved, folder: folder() });
        }
        let found = match access.direction {
            Direction::Read => crc32c::crc32c(part),
            Direction::Write => expected,
        };
        if found != expected {
            return Err(SwapError::Corrupted { access, expected, found, folder: folder() });
        }
        Ok(())
    }

    /// Fails all pending and later transfers with `failure`, unless the file has failed before.
    pub(crate) fn abort(&self, failure: SwapError) {
        self.fail(&mut self.lock(), failure);
    }

    fn fail(&self, state: &mut QueueState, failure: SwapError) {
        state.fail(failure);
        self.ended.notify_all();
        self.submitted.notify_all();
    }

    /// Adds a worker to the number of running workers.
    pub(crate) fn add_worker(&self) {
        self.lock().num_workers += 1;
    }

    /// Removes a worker from the number of running workers.
    pub(crate) fn remove_worker(&self) {
        self.lock().num_workers -= 1;
        self.ended.notify_all();
    }

    /// Closes the file: all pending transfers fail, unless the file has failed before. Waits until the system has finished the parts in
    /// flight, but no longer than the timeout of the oldest transfer. Returns whether all workers have ended.
    pub(crate) fn close(&self) -> bool {
        let mut state = self.lock();
        self.fail(&mut state, SwapError::Closed { folder: self.folder.clone() });
        while state.num_workers > 0 {
            let remaining = self.expire(&mut state);
            if remaining.is_zero() {
                return false;
            }
            state = self.wait_for_end(state, remaining);
        }
        true
    }

    fn wait_for_end<'a>(
        &self,
        state: MutexGuard<'a, QueueState>,
        remaining: Duration,
    ) -> MutexGuard<'a, QueueState> {
        self.ended.wait_timeout(state, remaining).expect("no thread panics while it holds the queue").0
    }

    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().expect("no thread panics while it holds the queue")
    }
}

impl Operation {
    /// Computes the checksum of a write. Needs no lock.
    fn with_checksum(mut self) -> Self {
        if self.access.direction == Direction::Write {
            self.checksum = crc32c::crc32c(&self.part);
        }
        self
    }
}
