//! Bytes that programs take.

use trireme_base::Category;
use trireme_schedule::Program;

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

/// What a rank takes at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Prediction {
    /// Of each category, whenever that is.
    pub peaks: CategoryBytes,
    /// Bytes of each category when the total is at its peak.
    pub at_peak: CategoryBytes,
    /// The line of the program's text at which that is; 1, the line of sizes, if it is before any action.
    pub line: usize,
    /// The most that all but activations take at a time.
    pub besides_activations: usize,
    /// The host's memory that state takes, which lives there or passes through it, at most.
    pub host: usize,
    /// The peak of all categories that the rank adds to the memory in use on its machine: without memory of other ranks that it maps.
    pub own: usize,
    /// What the rank holds between steps, counted as `own`.
    pub own_between_steps: usize,
    /// What of `own` and `host` is not in the memory of a device: shared with other ranks, or on its way to a disk.
    pub outside: usize,
}

impl Prediction {
    /// The peak of the total: at most the sum of the categories' peaks.
    pub fn total(&self) -> usize {
        self.at_peak.total()
    }

    /// What the rank adds to the memory in use on its machine, at most.
    pub fn on_machine(&self) -> usize {
        self.own + self.host
    }
}

/// What a rank takes at most while it runs a program, and where.
#[derive(Debug, Clone, PartialEq)]
pub struct DryRun {
    /// The program.
    pub program: Program,
    /// What it takes.
    pub prediction: Prediction,
    /// What each category takes at most while an action runs, for every action of the program.
    pub lines: Vec<CategoryBytes>,
}
