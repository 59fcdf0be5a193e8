use super::pass::Pass;
use super::schedule::PASSES_MAX;
use std::fmt;

/// A place in a schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Place {
    /// Rank.
    pub rank: usize,
    /// Place among the rank's passes, from 0.
    pub index: usize,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {}, pass {}", self.rank, self.index)
    }
}

/// A rank that waits, and for what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wait {
    /// Where it stands.
    pub place: Place,
    /// What it would do next.
    pub next: Waiting,
    /// The rank that it waits for.
    pub for_rank: usize,
}

/// What a rank waits with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waiting {
    /// A pass that needs the result of another one.
    Pass {
        /// The pass.
        pass: Pass,
        /// Whose result it needs.
        needs: Pass,
    },
    /// The result of a pass has nobody who receives it.
    Send(Pass),
    /// The result of a pass has nobody who sends it.
    Receive(Pass),
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Wait { place, next, for_rank } = self;
        match next {
            Waiting::Pass { pass, needs } => {
                write!(f, "{place}: '{pass}' waits for '{needs}' on rank {for_rank}")
            }
            Waiting::Send(pass) => {
                write!(
                    f,
                    "{place} sends the result of '{pass}' to rank {for_rank}, which does not receive it"
                )
            }
            Waiting::Receive(pass) => {
                write!(
                    f,
                    "{place} receives the result of '{pass}' from rank {for_rank}, which does not send it"
                )
            }
        }
    }
}

/// Ranks that wait in a ring, each for the next one; the last for the first. Or ranks that wait for one that has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ring(pub Vec<Wait>);

impl fmt::Display for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, wait) in self.0.iter().enumerate() {
            write!(f, "{}{wait}", if index == 0 { "" } else { "; " })?;
        }
        Ok(())
    }
}

/// A schedule that must not run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ScheduleError {
    /// No rank, stage, microbatch or step, or more passes than are worked with.
    #[error(
        "a schedule has {ranks} ranks, {stages} stages and {steps} steps of {microbatches} microbatches; it needs at \
         least one of each, and at most {PASSES_MAX} passes"
    )]
    Sizes {
        /// Ranks.
        ranks: usize,
        /// Stages.
        stages: usize,
        /// Microbatches of a step.
        microbatches: usize,
        /// Steps.
        steps: usize,
    },
    /// Costs of another number of stages.
    #[error("costs are given for {found} stages, but the schedule has {expected}")]
    CostsDiffer {
        /// Stages of the schedule.
        expected: usize,
        /// Stages of the costs.
        found: usize,
    },
    /// Bounds of another number of ranks.
    #[error("activation bounds are given for {found} ranks, but the schedule has {expected}")]
    BoundsDiffer {
        /// Ranks of the schedule.
        expected: usize,
        /// Bounds given.
        found: usize,
    },
    /// A stage lies on a rank that does not exist.
    #[error("stage {stage} is placed on rank {rank}, but there are only {num_ranks} ranks")]
    Placement {
        /// The stage.
        stage: usize,
        /// The rank.
        rank: usize,
        /// Ranks that exist.
        num_ranks: usize,
    },
    /// A stage or microbatch that does not exist.
    #[error(
        "{place}: '{pass}' is out of range: there are {num_stages} stages and {num_microbatches} microbatches"
    )]
    OutOfRange {
        /// Where.
        place: Place,
        /// The pass.
        pass: Pass,
        /// Stages that exist.
        num_stages: usize,
        /// Microbatches of all steps.
        num_microbatches: usize,
    },
    /// A pass of a stage that lies elsewhere.
    #[error("{place}: '{pass}' belongs to a stage on rank {expected}")]
    WrongRank {
        /// Where.
        place: Place,
        /// The pass.
        pass: Pass,
        /// Where the stage lies.
        expected: usize,
    },
    /// The same thing done twice; backward does both of its halves.
    #[error("{place}: '{pass}' repeats all or part of an earlier pass")]
    Repeated {
        /// Where.
        place: Place,
        /// The pass.
        pass: Pass,
    },
    /// Something of the same stage must come first.
    #[error("{place}: '{pass}' comes before '{missing}', whose result it needs")]
    TooEarly {
        /// Where.
        place: Place,
        /// The pass.
        pass: Pass,
        /// What must come first.
        missing: Pass,
    },
    /// Never done.
    #[error("rank {rank} lacks the pass '{missing}'")]
    Missing {
        /// Where the stage lies.
        rank: usize,
        /// The pass.
        missing: Pass,
    },
    /// More activations than memory was planned for.
    #[error("{place}: '{pass}' raises the activations on this rank to {held}; the bound is {bound}")]
    TooManyActivations {
        /// Where.
        place: Place,
        /// The pass.
        pass: Pass,
        /// What the rank would hold, in the unit of the costs.
        held: u64,
        /// The bound.
        bound: u64,
    },
    /// A gradient, or a loss, that another one should be added to first.
    #[error(
        "{place}: '{pass}' comes before '{missing}'; gradients and losses must be summed in microbatch order"
    )]
    SumMisordered {
        /// Where.
        place: Place,
        /// The pass.
        pass: Pass,
        /// What must come first.
        missing: Pass,
    },
    /// An update where none belongs: in a schedule that drains, or not after the last backward of a step.
    #[error("{place}: '{pass}' does not come after all gradients of a step of its stage")]
    UpdateMisplaced {
        /// Where.
        place: Place,
        /// The pass.
        pass: Pass,
    },
    /// A microbatch reads weights that are not there yet, or not any more.
    #[error(
        "{place}: '{pass}' needs version {version} of its weights, but the stage has only {newest} and the one before"
    )]
    NoSuchVersion {
        /// Where.
        place: Place,
        /// The pass.
        pass: Pass,
        /// The version that it reads: the updates that made it.
        version: usize,
        /// The newest version that there is.
        newest: usize,
    },
    /// Ranks wait for each other.
    #[error("deadlock: {0}")]
    Deadlock(Ring),
}

impl ScheduleError {
    /// Where, as far as the error is about one place.
    pub fn place(&self) -> Option<Place> {
        match self {
            ScheduleError::OutOfRange { place, .. }
            | ScheduleError::WrongRank { place, .. }
            | ScheduleError::Repeated { place, .. }
            | ScheduleError::TooEarly { place, .. }
            | ScheduleError::TooManyActivations { place, .. }
            | ScheduleError::SumMisordered { place, .. }
            | ScheduleError::UpdateMisplaced { place, .. }
            | ScheduleError::NoSuchVersion { place, .. } => Some(*place),
            ScheduleError::Deadlock(Ring(waits)) => waits.first().map(|wait| wait.place),
            ScheduleError::Sizes { .. }
            | ScheduleError::CostsDiffer { .. }
            | ScheduleError::BoundsDiffer { .. }
            | ScheduleError::Placement { .. }
            | ScheduleError::Missing { .. } => None,
        }
    }
}
