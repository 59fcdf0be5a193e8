use trireme_base::{CategoryBytes, MemoryUse};
use trireme_schedule::Program;

/// The result of a dry run: the peak memory use of a rank while it runs a program.
#[derive(Debug, Clone, PartialEq)]
pub struct DryRun {
    /// The program that was run.
    pub program: Program,
    /// Peak memory use of the rank.
    pub memory: MemoryUse,
    /// Peak bytes of each category while an action runs, for each action of the program.
    pub action_peaks: Vec<CategoryBytes>,
}
