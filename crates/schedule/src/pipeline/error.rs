use super::pass::Pass;
use super::schedule::PASSES_MAX;
use std::fmt;

/// A place in a schedule. `index` counts the rank's passes from 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "messages explain the fields")]
pub struct PassIndex {
    pub rank: usize,
    pub index: usize,
}

impl fmt::Display for PassIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}, pass {}", self.rank, self.index)
    }
}

/// A rank that waits at `place` to run `pass`, which needs the result of `needs` from rank `for_rank`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "messages explain the fields")]
pub struct Wait {
    pub place: PassIndex,
    pub pass: Pass,
    pub needs: Pass,
    pub for_rank: usize,
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Wait { place, pass, needs, for_rank } = self;
        write!(f, "{place}: '{pass}' waits for '{needs}' on rank {for_rank}")
    }
}

/// Waiting ranks, each of which waits for the next. The last rank waits for the first one (a cycle) or for a rank that has finished.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WaitChain(pub Vec<Wait>);

impl fmt::Display for WaitChain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, wait) in self.0.iter().enumerate() {
            write!(f, "{}{wait}", if index == 0 { "" } else { "; " })?;
        }
        Ok(())
    }
}

/// The reason why a schedule must not run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "messages explain the fields")]
pub enum ScheduleError {
    #[error(
        "a schedule has {ranks} ranks, {stages} stages and {steps} steps of {microbatches} microbatches; it needs at \
         least one of each, and at most {PASSES_MAX} passes"
    )]
    Sizes { ranks: usize, stages: usize, microbatches: usize, steps: usize },
    #[error("costs are given for {found} stages, but the schedule has {expected}")]
    CostsDiffer { expected: usize, found: usize },
    #[error("activation bounds are given for {found} ranks, but the schedule has {expected}")]
    BoundsDiffer { expected: usize, found: usize },
    #[error(
        "stage {stage} is placed on rank {rank}, but there are only {num_ranks} ranks; ranks count from 0"
    )]
    Placement { stage: usize, rank: usize, num_ranks: usize },
    #[error("{place}: '{pass}' {fault}")]
    Pass { place: PassIndex, pass: Pass, fault: PassFault },
    #[error("rank {rank} lacks the pass '{missing}'; add it to that rank")]
    Missing { rank: usize, missing: Pass },
    #[error("deadlock: {0}")]
    Deadlock(WaitChain),
}

/// The reason why a pass must not be at its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "messages explain the fields")]
pub enum PassFault {
    #[error("is out of range: there are {num_stages} stages and {num_microbatches} microbatches")]
    OutOfRange { num_stages: usize, num_microbatches: usize },
    #[error("belongs to a stage on rank {0}; move it there")]
    WrongRank(usize),
    /// The same work is done twice. A full backward includes both of its halves.
    #[error("repeats all or part of an earlier pass")]
    Repeated,
    #[error("comes before '{0}', whose result it needs")]
    TooEarly(Pass),
    #[error("raises the activations on this rank to {held}; the bound is {bound}")]
    TooManyActivations {
        /// Activations that the rank would hold, in the unit of the costs.
        held: u64,
        bound: u64,
    },
    #[error("comes before '{0}'; gradients and losses must be summed in microbatch order")]
    SumMisordered(Pass),
    /// Also reported for any update in a schedule that drains.
    #[error("does not come after all gradients of a step of its rank's stages")]
    UpdateMisplaced,
    #[error("needs version {version} of its weights, but the stage has only {newest} and the one before")]
    NoSuchVersion {
        /// The version that the pass reads, as the number of updates that produced it.
        version: usize,
        newest: usize,
    },
}

impl ScheduleError {
    /// Returns the place of the error, if it concerns one place.
    pub fn place(&self) -> Option<PassIndex> {
        match self {
            ScheduleError::Pass { place, .. } => Some(*place),
            ScheduleError::Deadlock(WaitChain(waits)) => waits.first().map(|wait| wait.place),
            _ => None,
        }
    }
}
