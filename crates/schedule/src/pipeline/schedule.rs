use super::pass::Pass;
use trireme_base::named;

/// Passes of a schedule at most. The times of so many, each of at most [`TICKS_MAX`](super::TICKS_MAX), can be added up.
pub const PASSES_MAX: usize = 1 << 22;

named! {
    /// Which version of a stage's weights a forward pass reads; backward of the microbatch reads the same one.
    #[derive(Default)]
    pub enum WeightVersions {
        /// There is one version: the pipeline drains before the update.
        #[default]
        Drained = "drained",
        /// The newest one that the stage has, kept until backward of the microbatch is done (PipeDream's weight stashing).
        Stashed = "stashed",
        /// The one before the newest that the step before leaves behind, so that two are enough (PipeDream-2BW).
        DoubleBuffered = "double-buffered",
    }
}

/// Where stages lie. With several stages a rank, stages are numbered along the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Round and round: stage `s` lies on rank `s % num_ranks`.
    Looped,
    /// There and back: after the last rank, stages go on from it towards the first.
    Folded,
}

impl Placement {
    /// The rank of each stage.
    pub fn stage_ranks(self, num_ranks: usize, stages_per_rank: usize) -> Vec<usize> {
        let forth = 0..num_ranks;
        let rank_in_turn = |turn: usize, place: usize| match self {
            Placement::Folded if turn % 2 == 1 => num_ranks - 1 - place,
            _ => place,
        };
        (0..stages_per_rank)
            .flat_map(|turn| forth.clone().map(move |place| rank_in_turn(turn, place)))
            .collect()
    }
}

/// What the ranks of a pipeline do between two points at which it is empty: each rank's passes, in order.
///
/// A synchronous schedule is one step, and says nothing of the update: whoever runs it updates all weights after it.
/// A schedule without drains ([`WeightVersions::Stashed`], [`WeightVersions::DoubleBuffered`]) is several steps, with
/// the updates among the passes; [`Schedule::versions_read`] says which version of its weights each pass reads.
///
/// The text form is a header and a line for each rank; `#` begins a comment:
/// ```text
/// ranks 2 placement 0,1 microbatches 2
/// rank 0: F 0 0, F 0 1, B 0 0, B 0 1
/// rank 1: F 1 0, B 1 0, F 1 1, B 1 1
/// ```
/// `placement` gives the rank of each stage. Without drains the header goes on with `steps 3 weights stashed`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    /// Microbatches of a step.
    pub num_microbatches: usize,
    /// Steps, one after the other without a drain between them; 1 for a synchronous schedule.
    pub num_steps: usize,
    /// Which version of its weights a stage reads.
    pub weights: WeightVersions,
    /// The rank of each stage.
    pub stage_ranks: Vec<usize>,
    /// For each rank, its passes in order.
    pub ranks: Vec<Vec<Pass>>,
}

impl Schedule {
    /// Ranks of the pipeline.
    pub fn num_ranks(&self) -> usize {
        self.ranks.len()
    }

    /// Stages of the model.
    pub fn num_stages(&self) -> usize {
        self.stage_ranks.len()
    }

    /// Microbatches of all steps.
    pub fn num_microbatches_in_all(&self) -> usize {
        self.num_microbatches * self.num_steps
    }

    /// Steps between an update and the one by whose norm it may clip, in a schedule without drains: the first one whose norm is known without waiting for ranks that
    /// are behind. A rank's update of a step comes after its backward of that step, which `(P - 1) / M` steps of the other ranks precede, of `P` ranks and `M` microbatches
    /// a step. The lag is that, rounded up, and at least one.
    pub fn norm_lag(num_ranks: usize, microbatches_per_step: usize) -> usize {
        (num_ranks - 1).div_ceil(microbatches_per_step).max(1)
    }

    /// Passes of all ranks.
    pub fn num_passes(&self) -> usize {
        self.ranks.iter().map(Vec::len).sum()
    }

    /// The stages of a rank, in the model's order.
    pub fn stages_of(&self, rank: usize) -> impl Iterator<Item = usize> + '_ {
        (0..self.num_stages()).filter(move |&stage| self.stage_ranks[stage] == rank)
    }
}
