use std::fmt;

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
    /// sharded.
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
