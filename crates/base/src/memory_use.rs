use crate::Category;

/// Bytes of each category, in the order of [`Category::ALL`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CategoryBytes(pub [usize; Category::ALL.len()]);

impl CategoryBytes {
    /// Bytes of one category.
    pub fn get(&self, category: Category) -> usize {
        self.0[category as usize]
    }

    /// The total of all categories but activations.
    pub fn besides_activations(&self) -> usize {
        self.total() - self.get(Category::Activations)
    }

    /// The total of all categories.
    pub fn total(&self) -> usize {
        self.0.iter().sum()
    }
}

/// What a rank holds at most while it repeats its program, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryUse {
    /// Of each category, whenever that is.
    pub peaks: CategoryBytes,
    /// Bytes of each category when the total is at its peak.
    pub at_peak: CategoryBytes,
    /// The line of the program's text at which that is; 1, the line of sizes, if it is before any action.
    pub line: usize,
    /// The most that all but activations take at a time.
    pub besides_activations: usize,
    /// The host's memory for state that lives there or passes through it, and for what a device with memory of its own exchanges.
    pub host: usize,
    /// The peak of all categories that the rank adds to the memory in use on its machine: without memory of other ranks that it maps.
    pub own: usize,
    /// What the rank holds between steps, counted as `own`.
    pub own_between_steps: usize,
    /// What of `own` and `host` is not in the memory of a device: shared with other ranks, or on its way to a disk.
    pub outside: usize,
}

impl MemoryUse {
    /// The peak of the total: at most the sum of the categories' peaks.
    pub fn total(&self) -> usize {
        self.at_peak.total()
    }

    /// What the rank adds to the memory in use on its machine, at most.
    pub fn on_machine(&self) -> usize {
        self.own + self.host
    }
}
