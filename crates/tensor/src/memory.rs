//! Counting memory by what it is for.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};

/// What a piece of memory is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Category {
    /// Weights.
    Parameters,
    /// Gradients of the weights, with the partial sums of gradient accumulation.
    Gradients,
    /// Optimizer state.
    Optimizer,
    /// Values saved for backward, their gradients, and what kernels need meanwhile.
    Activations,
    /// Buffers of messages, and whole units on their way: parameters that are gathered for use, gradients that are
    /// shared out.
    Communication,
}

impl Category {
    /// Every category, in the order of reports.
    pub const ALL: [Category; 5] = [
        Category::Parameters,
        Category::Gradients,
        Category::Optimizer,
        Category::Activations,
        Category::Communication,
    ];

    /// Field name in reports and `metrics.jsonl`.
    pub const fn name(self) -> &'static str {
        match self {
            Category::Parameters => "parameters",
            Category::Gradients => "gradients",
            Category::Optimizer => "optimizer",
            Category::Activations => "activations",
            Category::Communication => "communication",
        }
    }
}

impl fmt::Display for Category {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Bytes in use now and at most so far, by category.
#[derive(Debug, Default)]
pub struct MemoryCounter {
    current: [AtomicUsize; 5],
    peak: [AtomicUsize; 5],
}

/// A reading of one category, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryUsage {
    /// In use now.
    pub current: usize,
    /// In use at most since the start.
    pub peak: usize,
}

impl MemoryCounter {
    /// Counts `bytes` taken for `category`.
    pub fn add(&self, category: Category, bytes: usize) {
        let slot = category as usize;
        let now = self.current[slot].fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak[slot].fetch_max(now, Ordering::Relaxed);
    }

    /// Counts `bytes` given back by `category`.
    pub fn subtract(&self, category: Category, bytes: usize) {
        self.current[category as usize].fetch_sub(bytes, Ordering::Relaxed);
    }

    /// The reading of one category.
    pub fn usage(&self, category: Category) -> MemoryUsage {
        let slot = category as usize;
        MemoryUsage {
            current: self.current[slot].load(Ordering::Relaxed),
            peak: self.peak[slot].load(Ordering::Relaxed),
        }
    }

    /// Sum of the categories' peaks, in bytes: what the process held at most, if all peaked together.
    pub fn peak_total(&self) -> usize {
        Category::ALL.iter().map(|&category| self.usage(category).peak).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn peaks_stay_when_memory_is_given_back() {
        let counter = MemoryCounter::default();
        counter.add(Category::Activations, 10);
        counter.add(Category::Activations, 5);
        counter.subtract(Category::Activations, 12);
        counter.add(Category::Gradients, 1);
        assert_eq!(counter.usage(Category::Activations), MemoryUsage { current: 3, peak: 15 });
        assert_eq!(counter.peak_total(), 16);
    }
}
