use trireme_base::{CategoryBytes, MemoryUse};
use trireme_schedule::Program;

/// What a rank takes at most while it runs a program, and where.
#[derive(Debug, Clone, PartialEq)]
pub struct DryRun {
    /// The program.
    pub program: Program,
    /// What it takes.
    pub prediction: MemoryUse,
    /// What each category takes at most while an action runs, for every action of the program.
    pub lines: Vec<CategoryBytes>,
}
