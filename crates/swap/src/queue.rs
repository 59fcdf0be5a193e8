//! What the callers of a swap file and the threads that serve it share.

use crate::buffer::AlignedBuffer;
use crate::raw::Part;
use crate::state::{Block, State};
use crate::{Access, Direction, SwapError, SwapOptions, SwapStatistics};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

pub(crate) struct Queue {
    pub(crate) folder: PathBuf,
    options: SwapOptions,
    state: Mutex<State>,
    /// There may be something for a worker to do.
    submitted: Condvar,
    /// A transfer or a worker has ended, or all failed.
    ended: Condvar,
}

/// A part of a transfer, for the system to read or write.
#[derive(Debug)]
pub(crate) struct Operation {
    pub(crate) slot: usize,
    pub(crate) part_index: usize,
    pub(crate) access: Access,
    /// What was written here last; for a write, once it is prepared, what is written now.
    pub(crate) checksum: u32,
    pub(crate) part: Part,
}

impl Queue {
    pub(crate) fn new(folder: PathBuf, blocks: Vec<Block>, options: &SwapOptions) -> Self {
        Queue {
            folder,
            options: options.clone(),
            state: Mutex::new(State::new(blocks)),
            submitted: Condvar::new(),
            ended: Condvar::new(),
        }
    }

    /// Issues a transfer of a whole block; its slot, or why the file is of no use.
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

    /// A block's length in bytes, and whether a write of it was issued.
    pub(crate) fn block(&self, block: usize) -> (usize, bool) {
        let state = self.lock();
        let Block { bytes, is_written, .. } = state.blocks[block];
        (bytes, is_written)
    }

    pub(crate) fn statistics(&self) -> SwapStatistics {
        self.lock().statistics
    }

    /// Waits for the transfer in `slot`, and at the longest until the oldest transfer has had its time.
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

    /// Fails the file if the oldest transfer has had its time; otherwise how long it still has.
    fn expire(&self, state: &mut State) -> Duration {
        let Some((began, access)) = state.oldest_running() else { return self.options.timeout };
        let remaining = self.options.timeout.saturating_sub(began.elapsed());
        if remaining.is_zero() && state.failure.is_none() {
            let (folder, timeout) = (self.folder.clone(), self.options.timeout);
            self.fail(state, SwapError::Timeout { access, folder, timeout });
        }
        remaining
    }

    /// The next operation, ready for the system, once there is one; none when the file is closed or has failed.
    pub(crate) fn next(&self) -> Option<Operation> {
        let mut state = self.lock();
        loop {
            if let Some(operation) = state.next_operation(self.options.part_bytes) {
                drop(state);
                return Some(operation.prepared());
            }
            if state.failure.is_some() {
                return None;
            }
            state = self.submitted.wait(state).expect("no thread panics while it holds the queue");
        }
    }

    /// The next operation, ready for the system, if there is one.
    pub(crate) fn try_next(&self) -> Option<Operation> {
        let operation = self.lock().next_operation(self.options.part_bytes)?;
        Some(operation.prepared())
    }

    /// Takes note of what the system said of an operation.
    pub(crate) fn end(&self, operation: Operation, result: io::Result<usize>) {
        let result = match &self.options.interceptor {
            Some(interceptor) => interceptor.result(&operation.access, result),
            None => result,
        };
        let judgement = self.judge(&operation, result);
        let Operation { slot, part_index, access, checksum, part } = operation;
        // The transfer can have its buffer back only when no part of it is left.
        drop(part);
        let mut state = self.lock();
        match judgement {
            Ok(()) => state.record(access, part_index, checksum),
            Err(failure) => self.fail(&mut state, failure),
        }
        if state.end_part(slot) {
            self.ended.notify_all();
            // Another transfer of the block may have waited for this one.
            self.submitted.notify_all();
        }
    }

    fn judge(&self, operation: &Operation, result: io::Result<usize>) -> Result<(), SwapError> {
        let Operation { access, checksum: expected, ref part, .. } = *operation;
        let folder = || self.folder.clone();
        let refused = |source| SwapError::Refused { access, folder: folder(), source: Arc::new(source) };
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

    /// Ends everything with `failure`, unless something else did before.
    pub(crate) fn abort(&self, failure: SwapError) {
        self.fail(&mut self.lock(), failure);
    }

    fn fail(&self, state: &mut State, failure: SwapError) {
        state.fail(failure);
        self.ended.notify_all();
        self.submitted.notify_all();
    }

    /// Counts a thread that serves the queue.
    pub(crate) fn enter(&self) {
        self.lock().num_workers += 1;
    }

    /// A thread that served the queue goes.
    pub(crate) fn leave(&self) {
        self.lock().num_workers -= 1;
        self.ended.notify_all();
    }

    /// Ends the file: what has not begun never will. Waits until the system is done with what has, or until the
    /// oldest transfer has had its time; whether all threads have left.
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

    fn wait_for_end<'a>(&self, state: MutexGuard<'a, State>, remaining: Duration) -> MutexGuard<'a, State> {
        self.ended.wait_timeout(state, remaining).expect("no thread panics while it holds the queue").0
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread panics while it holds the queue")
    }
}

impl Operation {
    /// Takes the checksum of what will be written, which needs no lock.
    fn prepared(mut self) -> Self {
        if self.access.direction == Direction::Write {
            self.checksum = crc32c::crc32c(&self.part);
        }
        self
    }
}
