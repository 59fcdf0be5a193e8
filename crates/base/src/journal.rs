//! What a rank does, in order, as far as its time depends on it.

use crate::{Cost, Rank};
use std::sync::atomic::{AtomicUsize, Ordering};
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
pub enum Issued {
    /// An operation of a group.
    Collective {
        /// Its name, such as `all_reduce`.
        operation: &'static str,
        /// Elements of all blocks, and bytes of one.
        len: usize,
        /// Bytes of an element.
        element_bytes: usize,
        /// The group's ranks, as ranks of the world.
        members: Arc<[Rank]>,
    },
    /// A message to a rank of the world.
    Send {
        /// Who receives it.
        to: Rank,
        /// Its length.
        bytes: usize,
    },
    /// A message from a rank of the world.
    Receive {
        /// Who sends it.
        from: Rank,
        /// Its length.
        bytes: usize,
    },
    /// State on its way from a disk.
    DiskRead {
        /// Its length.
        bytes: usize,
    },
    /// State on its way to a disk.
    DiskWrite {
        /// Its length.
        bytes: usize,
    },
}

/// An entry of a [`Journal`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A kernel began.
    Kernel(KernelCall),
    /// Something was issued under a number of its own.
    Issue(usize, Issued),
    /// What was issued under this number was waited for.
    Await(usize),
    /// The kernel before has ended, and none follows at once.
    Pause,
}

/// Notes what devices and groups do that keep it. Clones are one journal.
#[derive(Debug, Clone, Default)]
pub struct Journal {
    events: Arc<Mutex<Vec<(Event, Instant)>>>,
    num_issued: Arc<AtomicUsize>,
}

impl Journal {
    /// Notes that something happens now.
    pub fn note(&self, event: Event) {
        self.lock().push((event, Instant::now()));
    }

    /// Notes that something is issued; its number.
    pub fn issue(&self, issued: Issued) -> usize {
        let number = self.num_issued.fetch_add(1, Ordering::Relaxed);
        self.note(Event::Issue(number, issued));
        number
    }

    /// What was noted since the last time, and when.
    pub fn take(&self) -> Vec<(Event, Instant)> {
        std::mem::take(&mut *self.lock())
    }

    fn lock(&self) -> MutexGuard<'_, Vec<(Event, Instant)>> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
