use super::pass::Pass;
use trireme_base::named;

/// Maximum number of passes of a schedule. The total time of this many passes, each of at most [`TICKS_MAX`](super::TICKS_MAX), does not
/// overflow.
pub const PASSES_MAX: usize = 1 << 22;

named! {
    /// The version of a stage's weights that a forward pass reads. Backward of the microbatch reads the same version.
    #[derive(Default)]
    pub enum WeightVersions {
        /// The only version: the pipeline drains before the update.
        #[default]
        Drained = "drained",
        /// The newest version of the stage, kept until backward of the microbatch is done (PipeDream's weight stashing).
        Stashed = "stashed",
        /// The version before the one that the previous step produces. Two versions are therefore enough (PipeDream-2BW).
        DoubleBuffered = "double-buffered",
    }
}

/// The placement of stages on ranks. Stages are numbered along the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StagePlacement {
    /// Stage `s` is on rank `s % num_ranks`.
    Looped,
    /// After the last rank, stages continue from the last rank back to the first.
    Folded,
}

impl StagePlacement {
    /// Returns the rank of each stage.
    pub fn stage_ranks(self, num_ranks: usize, stages_per_rank: usize) -> Vec<usize> {
        let forth = 0..num_ranks;
        let rank_in_turn = |turn: usize, place: usize| match self {
            StagePlacement::Folded if turn % 2 == 1 => num_ranks - 1 - place,
            _ => place,
        };
        (0..stages_per_rank)
            .flat_map(|turn| forth.clone().map(move |place| rank_in_turn(turn, place)))
            .collect()
    }
}

/// The passes of each rank of a pipeline, in order, from one drain of the pipeline to the next.
///
/// A synchronous schedule is one step and does not contain the update: the executor updates all weights after it. A schedule without drains
/// between steps ([`WeightVersions::Stashed`], [`WeightVersions::DoubleBuffered`]) is several steps, with the updates among the passes.
/// [`Schedule::versions_read`] returns the weight version that each pass reads.
///
/// The text form is a header and a line for each rank; `#` begins a comment:
/// ```text
/// ranks 2 placement 0,1 microbatches 2
/// rank 0: F 0 0, F 0 1, B 0 0, B 0 1
/// rank 1: F 1 0, B 1 0, F 1 1, B 1 1
/// ```
/// `placement` gives the rank of each stage. Without drains, the header continues with `steps 3 weights stashed`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schedule {
    /// Number of microbatches of a step.
    pub num_microbatches: usize,
    /// Number of steps that follow each other without a drain; 1 for a synchronous schedule.
    pub num_steps: usize,
    /// The version of a stage's weights that its passes read.
    pub weights: WeightVersions,
    /// The rank of each stage.
    pub stage_ranks: Vec<usize>,
    /// The passes of each rank, in order.
    pub ranks: Vec<Vec<Pass>>,
}

impl Schedule {
    /// Returns the number of ranks.
    pub fn num_ranks(&self) -> usize {
        self.ranks.len()
    }

    /// Returns the number of stages.
    pub fn num_stages(&self) -> usize {
        self.stage_ranks.len()
    }

    /// Returns the number of microbatches of all steps.
    pub fn total_microbatches(&self) -> usize {
        self.num_microbatches * self.num_steps
    }

    /// Returns the age, in steps, of the gradient norm by which an update may clip in a schedule without drains. It is the age of the most
    /// recent norm that is known without waiting for slower ranks. With `P` ranks and `M` microbatches per step, backward on one rank is at
    /// most `P - 1` microbatches, or `(P - 1) / M` steps, behind another rank. The age is this number rounded up, and at least 1.
    pub fn norm_lag(num_ranks: usize, microbatches_per_step: usize) -> usize {
        (num_ranks - 1).div_ceil(microbatches_per_step).max(1)
    }

    /// Returns the number of passes of all ranks.
    pub fn num_passes(&self) -> usize {
        self.ranks.iter().map(Vec::len).sum()
    }

    /// Returns the stages of a rank, in model order.
    pub fn stages_of(&self, rank: usize) -> impl Iterator<Item = usize> + '_ {
        (0..self.num_stages()).filter(move |&stage| self.stage_ranks[stage] == rank)
    }
}
