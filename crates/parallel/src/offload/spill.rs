//! Files for activations that exceed a device's memory budget.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use trireme_base::HostMemory;
use trireme_swap::FileBackedMemory;
use trireme_tensor::{LentMemory, OverflowAllocator};

/// Files for activations that exceed a device's memory budget, because its experts got more tokens than the plan assumed.
#[derive(Debug)]
pub struct Spill {
    folder: PathBuf,
    counter: Arc<Counter>,
}

#[derive(Debug, Default)]
struct Counter {
    in_use: AtomicUsize,
    peak: AtomicUsize,
}

impl Spill {
    /// Files in `folder`, which are created on demand.
    pub fn new(folder: PathBuf) -> Self {
        Spill { folder, counter: Arc::default() }
    }

    /// Peak number of bytes in files.
    pub fn peak(&self) -> usize {
        self.counter.peak.load(Ordering::Relaxed)
    }
}

impl OverflowAllocator for Spill {
    /// Returns `None` if a file cannot be created: the user then sees the error that the budget is exceeded.
    fn allocate(&self, num_bytes: usize) -> Option<Box<dyn LentMemory>> {
        let memory = FileBackedMemory::new(&self.folder, num_bytes).ok()?;
        let counter = Arc::clone(&self.counter);
        let in_use = counter.in_use.fetch_add(num_bytes, Ordering::Relaxed) + num_bytes;
        counter.peak.fetch_max(in_use, Ordering::Relaxed);
        Some(Box::new(Spilled { memory, counter }))
    }
}

struct Spilled {
    memory: FileBackedMemory,
    counter: Arc<Counter>,
}

impl fmt::Debug for Spilled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Spilled({} bytes)", self.memory.len())
    }
}

impl HostMemory for Spilled {
    fn bytes(&self) -> &[u8] {
        &self.memory
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory
    }
}

impl LentMemory for Spilled {
    fn return_to_owner(self: Box<Self>) {
        self.counter.in_use.fetch_sub(self.memory.len(), Ordering::Relaxed);
    }
}
