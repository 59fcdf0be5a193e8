//! What a rank does, in order, as far as its time depends on it.

use crate::{Cost, Rank};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// A kernel that was called, as far as its time depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KernelCall {
    /// The method of the device.
    pub kernel: &'static str,
    /// What the call costs.
    pub cost: Cost,
}

/// Something that goes on beside the kernels of a rank, until it is waited for.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(missing_docs, reason = "variants explain their fields")]
pub enum Issued {
    /// An operation of a group.
    Collective {
        /// Its name, such as `all_reduce`.
        operation: &'static str,
        /// Number of elements of all blocks.
        len: usize,
        element_bytes: usize,
        /// The group's ranks, as ranks of the world.
        members: Arc<[Rank]>,
    },
    /// A message to a rank of the world.
    Send { to: Rank, bytes: usize },
    /// A message from a rank of the world.
    Receive { from: Rank, bytes: usize },
    /// State on its way from a disk.
    DiskRead { bytes: usize },
    /// State on its way to a disk.
    DiskWrite { bytes: usize },
}

/// Something that a [`Journal`] notes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JournalEntry {
    /// A kernel began.
    Kernel(KernelCall),
    /// Something was issued under a number of its own.
    Issue(usize, Issued),
    /// What was issued under this number was waited for.
    Await(usize),
    /// The kernel before has ended, and none follows at once.
    Pause,
}

/// What a rank does in each step, as far as the step's time depends on it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepEntries {
    /// For each action of the rank's program, what happens while it runs; and what happens after the last one.
    pub actions: Vec<Vec<JournalEntry>>,
    /// How much is issued in a step. An await of what the step before issued has this number less than its like in this step.
    pub num_issued: usize,
}

/// Notes what devices and groups do that keep it. Clones are one journal.
#[derive(Debug, Clone, Default)]
pub struct Journal(Arc<Mutex<Noted>>);

#[derive(Debug, Default)]
struct Noted {
    entries: Vec<(JournalEntry, Instant)>,
    num_issued: usize,
}

impl Journal {
    /// Notes that something happens now.
    pub fn note(&self, entry: JournalEntry) {
        self.lock().entries.push((entry, Instant::now()));
    }

    /// Notes that something is issued; its number.
    pub fn issue(&self, issued: Issued) -> usize {
        let mut noted = self.lock();
        let number = noted.num_issued;
        noted.num_issued += 1;
        noted.entries.push((JournalEntry::Issue(number, issued), Instant::now()));
        number
    }

    /// What was noted since the last time, and when.
    pub fn take(&self) -> Vec<(JournalEntry, Instant)> {
        std::mem::take(&mut self.lock().entries)
    }

    fn lock(&self) -> MutexGuard<'_, Noted> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
