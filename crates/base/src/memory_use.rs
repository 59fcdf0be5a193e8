use crate::Category;

/// A number of bytes for each category, in the order of [`Category::ALL`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CategoryBytes(pub [usize; Category::ALL.len()]);

impl CategoryBytes {
    /// Returns the bytes of one category.
    pub fn get(&self, category: Category) -> usize {
        self.0[category as usize]
    }

    /// Returns the total of all categories except activations.
    pub fn excluding_activations(&self) -> usize {
        self.total() - self.get(Category::Activations)
    }

    /// Returns the total of all categories.
    pub fn total(&self) -> usize {
        self.0.iter().sum()
    }
}

/// Peak memory of a rank over the steps of its program, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryUse {
    /// The peak of each category. Different categories may peak at different times.
    pub peaks: CategoryBytes,
    /// Bytes of each category at the time when their total peaks.
    pub at_peak: CategoryBytes,
    /// The line of the program's text at which the total peaks. Line 1, which lists sizes, stands for the time before the first action.
    pub line: usize,
    /// The peak of the total of all categories except activations.
    pub excluding_activations: usize,
    /// Peak of host memory that is not the memory of the device: offloaded state that resides in or passes through host memory, and
    /// staging buffers for communication if the device cannot reach host memory.
    pub host: usize,
    /// The peak of the total of all categories, excluding memory of other ranks that this rank maps.
    pub own: usize,
    /// Bytes in use between steps, except memory of other ranks that this rank maps.
    pub own_between_steps: usize,
    /// The portion of `own` and `host` that is allocated outside the device's arena: memory shared with other ranks, and buffers for
    /// transfers to and from disk.
    pub outside_arena: usize,
}

impl MemoryUse {
    /// Returns the peak of the total. This is at most the sum of the peaks of the categories.
    pub fn total(&self) -> usize {
        self.at_peak.total()
    }

    /// Returns an upper bound on the memory that the rank adds to its machine.
    pub fn on_machine(&self) -> usize {
        self.own + self.host
    }
}
