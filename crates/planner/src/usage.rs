//! Counting bytes, line by line.

use trireme_base::Category;

/// Bytes by what they are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CategoryBytes([usize; Category::ALL.len()]);

impl CategoryBytes {
    /// Bytes of each category, in the order of [`Category::ALL`].
    pub fn new(bytes: [usize; Category::ALL.len()]) -> Self {
        CategoryBytes(bytes)
    }

    /// Bytes of one category.
    pub fn get(&self, category: Category) -> usize {
        self.0[category as usize]
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
    /// The host's memory that state takes, which lives there or passes through it, at most.
    pub host: usize,
    /// The peak of all categories, without memory of other ranks that this one maps: what the rank adds to the memory in use
    /// on its machine.
    pub own: usize,
    /// What the rank holds between steps, counted as `own`.
    pub own_between_steps: usize,
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

/// Bytes in use while a program is gone through.
#[derive(Debug, Default)]
pub(crate) struct Usage {
    current: CategoryBytes,
    /// Bytes of other ranks' memory that are part of `current`.
    mapped: usize,
    line: usize,
    /// Of each category at most since the line began.
    line_peaks: CategoryBytes,
    found: Prediction,
}

impl Usage {
    pub(crate) fn new() -> Self {
        let found = Prediction { line: 1, ..Prediction::default() };
        Usage { line: 1, found, ..Usage::default() }
    }

    pub(crate) fn set_line(&mut self, line: usize) {
        (self.line, self.line_peaks) = (line, self.current);
    }

    pub(crate) fn take(&mut self, category: Category, bytes: usize) {
        self.current.0[category as usize] += bytes;
        for peaks in [&mut self.line_peaks, &mut self.found.peaks] {
            let peak = &mut peaks.0[category as usize];
            *peak = (*peak).max(self.current.get(category));
        }
        if self.current.total() > self.found.total() {
            (self.found.at_peak, self.found.line) = (self.current, self.line);
        }
        self.found.own = self.found.own.max(self.own());
    }

    /// Takes bytes of other ranks' memory, which they count as well. They stay mapped.
    pub(crate) fn take_mapped(&mut self, bytes: usize) {
        self.mapped += bytes;
        self.take(Category::Communication, bytes);
    }

    pub(crate) fn give(&mut self, category: Category, bytes: usize) {
        self.current.0[category as usize] -= bytes;
    }

    /// What is there for a moment only.
    pub(crate) fn touch(&mut self, category: Category, bytes: usize) {
        self.take(category, bytes);
        self.give(category, bytes);
    }

    pub(crate) fn line_peaks(&self) -> CategoryBytes {
        self.line_peaks
    }

    /// What is in use now, without memory of other ranks.
    fn own(&self) -> usize {
        self.current.total() - self.mapped
    }

    /// What was found, after the last step.
    pub(crate) fn found(&self) -> Prediction {
        Prediction { own_between_steps: self.own(), ..self.found }
    }
}
