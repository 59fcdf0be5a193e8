//! Sizes of a pipeline schedule.

/// The numbers of ranks, microbatches, stages and steps of a schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Sizes {
    /// Ranks of the pipeline, `P` in papers.
    pub num_ranks: usize,
    /// Microbatches of a step, `M` in papers.
    pub num_microbatches: usize,
    /// Stages of a rank, `V` in papers.
    pub stages_per_rank: usize,
    /// Steps between two points at which the pipeline is empty; 1 for synchronous schedules.
    pub num_steps: usize,
}
