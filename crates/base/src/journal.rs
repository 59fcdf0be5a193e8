//! A record of the kernels, collectives, messages and disk transfers of a rank, from which the time of a step is simulated.

use crate::{Cost, Rank};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// A call of a kernel, with the facts that determine its time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KernelCall {
    /// Name of the device method that runs the kernel.
    pub kernel: &'static str,
    /// Operations and memory traffic of the call.
    pub cost: Cost,
}

/// An asynchronous operation, which runs concurrently with the rank's kernels until it is awaited.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(missing_docs, reason = "variants explain their fields")]
pub enum AsyncOperation {
    /// A collective operation of a group.
    Collective {
        /// Name of the operation, such as `all_reduce`.
        operation: &'static str,
        /// Number of elements of the full vector, or of this rank's vector if lengths differ between ranks.
        len: usize,
        element_bytes: usize,
        /// The members of the group, as ranks of the world.
        members: Arc<[Rank]>,
    },
    /// A message to a rank of the world.
    Send { to: Rank, bytes: usize },
    /// A message from a rank of the world.
    Receive { from: Rank, bytes: usize },
    /// A read of state from disk.
    DiskRead { bytes: usize },
    /// A write of state to disk.
    DiskWrite { bytes: usize },
}

/// An entry of a [`Journal`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JournalEntry {
    /// A kernel was started.
    Kernel(KernelCall),
    /// An asynchronous operation was issued. The number identifies it.
    Issue(usize, AsyncOperation),
    /// The rank waited for the operation with this number.
    Await(usize),
    /// The previous kernel has ended, and no other kernel follows immediately.
    Pause,
}

/// The journal entries of one training step of a rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepEntries {
    /// For each action of the rank's program, the entries that were recorded while it ran. A last element holds the entries after the last
    /// action.
    pub actions: Vec<Vec<JournalEntry>>,
    /// Number of operations that every step issues. In the next step, the number that identifies an operation is larger by this amount.
    pub issued_per_step: usize,
}

/// A shared, ordered record of the work that a rank issues. Clones append to the same journal.
#[derive(Debug, Clone, Default)]
pub struct Journal(Arc<Mutex<JournalState>>);

#[derive(Debug, Default)]
struct JournalState {
    entries: Vec<(JournalEntry, Instant)>,
    num_issued: usize,
}

impl Journal {
    /// Appends an entry with the current time.
    pub fn record(&self, entry: JournalEntry) {
        self.lock().entries.push((entry, Instant::now()));
    }

    /// Appends the issue of an operation with the current time, and returns the operation's number. Numbers count up from 0.
    pub fn issue(&self, issued: AsyncOperation) -> usize {
        let mut state = self.lock();
        let number = state.num_issued;
        state.num_issued += 1;
        state.entries.push((JournalEntry::Issue(number, issued), Instant::now()));
        number
    }

    /// Removes and returns all entries since the last call, with the times at which they were recorded.
    pub fn take(&self) -> Vec<(JournalEntry, Instant)> {
        std::mem::take(&mut self.lock().entries)
    }

    fn lock(&self) -> MutexGuard<'_, JournalState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
