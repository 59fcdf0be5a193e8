//! One entry to all schedules.

use super::costs::Costs;
use super::error::{Place, ScheduleError};
use super::kind::Kind;
use super::schedule::{PASSES_MAX, Schedule};
use super::validate::check_activations;
use super::{
    automatic, breadth_first, dualpipe_v, gpipe, interleaved, one_f_one_b, pipedream, zero_bubble,
    zero_bubble_v,
};

/// What a schedule is for.
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

/// A schedule that cannot be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GenerateError {
    /// No rank, stage, microbatch or step.
    #[error("a pipeline needs at least one rank, stage, microbatch and step; requested: {0:?}")]
    Empty(Sizes),
    /// More passes than are worked with.
    #[error(
        "a pipeline of {0:?} has more than {PASSES_MAX} passes; use fewer microbatches, or fewer steps between drains"
    )]
    TooLarge(Sizes),
    /// The schedule is for another number of stages.
    #[error("schedule '{kind}' needs {expected} stages per rank, not {found}; set that, or choose {instead}")]
    StagesPerRank {
        /// Which schedule.
        kind: Kind,
        /// What it needs.
        expected: &'static str,
        /// What was asked for.
        found: usize,
        /// Schedules for that number.
        instead: &'static str,
    },
    /// Too few microbatches.
    #[error(
        "schedule '{kind}' needs at least {min} microbatches on {num_ranks} ranks, not {found}; raise the global \
         batch size, or choose {instead}"
    )]
    Microbatches {
        /// Which schedule.
        kind: Kind,
        /// Ranks.
        num_ranks: usize,
        /// The least that it works with.
        min: usize,
        /// What was asked for.
        found: usize,
        /// Schedules for that number.
        instead: &'static str,
    },
    /// A synchronous schedule of several steps.
    #[error(
        "schedule '{kind}' drains after each step, so it cannot span {found} steps; choose pipedream or pipedream-2bw"
    )]
    Steps {
        /// Which schedule.
        kind: Kind,
        /// What was asked for.
        found: usize,
    },
    /// Costs of another number of stages.
    #[error("costs are given for {found} stages, but the pipeline has {expected}")]
    CostsDiffer {
        /// Stages of the pipeline.
        expected: usize,
        /// Stages of the costs.
        found: usize,
    },
    /// Bounds of another number of ranks.
    #[error("activation bounds are given for {found} ranks, but the pipeline has {expected}")]
    BoundsDiffer {
        /// Ranks of the pipeline.
        expected: usize,
        /// Bounds given.
        found: usize,
    },
    /// The schedule holds more activations than there is memory for.
    #[error("schedule '{kind}' holds {needed} of activations on rank {rank}, but only {bound} fit; {remedy}")]
    Memory {
        /// Which schedule.
        kind: Kind,
        /// The rank.
        rank: usize,
        /// What it would hold, in the unit of the costs.
        needed: u64,
        /// What fits.
        bound: u64,
        /// What to try.
        remedy: &'static str,
    },
}

/// Makes a schedule. Costs decide for [`Kind::Automatic`] only; for the others they give activations their sizes. A
/// schedule that holds more than `activations_max` of a rank is refused.
///
/// Cost: linear in the passes. [`Kind::Automatic`] makes and times 10 to 40 schedules, and improves on two or three of them
/// by timing variants, of 8 million passes each at most: up to a second for 64 ranks with 512 microbatches and two stages a
/// rank, milliseconds for small pipelines, or where a fixed schedule has the least time that there can be.
pub fn generate(
    kind: Kind,
    sizes: Sizes,
    costs: &Costs,
    activations_max: Option<&[u64]>,
) -> Result<Schedule, GenerateError> {
    check_sizes(sizes)?;
    check_kind(kind, sizes)?;
    let expected = sizes.num_ranks * sizes.stages_per_rank;
    let found = costs.stages().len();
    if expected != found {
        return Err(GenerateError::CostsDiffer { expected, found });
    }
    if let Some(bounds) = activations_max.filter(|bounds| bounds.len() != sizes.num_ranks) {
        return Err(GenerateError::BoundsDiffer { expected: sizes.num_ranks, found: bounds.len() });
    }
    if kind == Kind::Automatic {
        return automatic::schedule(sizes, costs, activations_max);
    }
    let schedule = fixed(kind, sizes);
    match activations_max.map(|bounds| check_activations(&schedule, costs, bounds)) {
        Some(Err(ScheduleError::TooManyActivations { place: Place { rank, .. }, held, bound, .. })) => {
            let remedy = "choose another schedule (auto respects the bound), recompute more, or use smaller \
                 microbatches";
            Err(GenerateError::Memory { kind, rank, needed: held, bound, remedy })
        }
        _ => Ok(schedule),
    }
}

/// A schedule that does not depend on costs, of sizes that fit it.
pub(super) fn fixed(kind: Kind, sizes: Sizes) -> Schedule {
    let Sizes { num_ranks, num_microbatches, stages_per_rank, num_steps } = sizes;
    match kind {
        Kind::GPipe => gpipe::schedule(num_ranks, num_microbatches),
        Kind::OneFOneB => one_f_one_b::schedule(num_ranks, num_microbatches),
        Kind::Interleaved => interleaved::schedule(num_ranks, num_microbatches, stages_per_rank),
        Kind::ZeroBubbleH1 => zero_bubble::h1(num_ranks, num_microbatches),
        Kind::ZeroBubbleH2 => zero_bubble::h2(num_ranks, num_microbatches),
        Kind::ZeroBubbleV => zero_bubble_v::schedule(num_ranks, num_microbatches),
        Kind::DualPipeV => dualpipe_v::schedule(num_ranks, num_microbatches),
        Kind::BreadthFirst => breadth_first::schedule(num_ranks, num_microbatches, stages_per_rank),
        Kind::PipeDream => pipedream::stashed(num_ranks, num_microbatches, num_steps),
        Kind::PipeDream2Bw => pipedream::double_buffered(num_ranks, num_microbatches, num_steps),
        Kind::Automatic => unreachable!("it depends on costs"),
    }
}

fn check_sizes(sizes: Sizes) -> Result<(), GenerateError> {
    let Sizes { num_ranks, num_microbatches, stages_per_rank, num_steps } = sizes;
    let factors = [num_ranks, num_microbatches, stages_per_rank, num_steps];
    if factors.contains(&0) {
        return Err(GenerateError::Empty(sizes));
    }
    // Three halves and an update for each microbatch at most.
    let num_passes = factors.into_iter().try_fold(4_usize, usize::checked_mul);
    if num_passes.is_some_and(|number| number <= PASSES_MAX) {
        Ok(())
    } else {
        Err(GenerateError::TooLarge(sizes))
    }
}

/// Whether a schedule fits the sizes.
pub(super) fn check_kind(kind: Kind, sizes: Sizes) -> Result<(), GenerateError> {
    let Sizes { num_ranks, num_microbatches, stages_per_rank, num_steps } = sizes;
    if kind.is_synchronous() && num_steps != 1 {
        return Err(GenerateError::Steps { kind, found: num_steps });
    }
    let several = "interleaved-1f1b, breadth-first or auto";
    let (stages_min, stages_max) = kind.stages_per_rank();
    if !(stages_min..=stages_max).contains(&stages_per_rank) {
        let (expected, instead) = match kind {
            Kind::Interleaved => ("2 or more", "1f1b"),
            Kind::ZeroBubbleV | Kind::DualPipeV if stages_per_rank == 1 => ("2", "zb-h1 or zb-h2"),
            Kind::ZeroBubbleV | Kind::DualPipeV => ("2", several),
            _ => ("1", several),
        };
        return Err(GenerateError::StagesPerRank { kind, expected, found: stages_per_rank, instead });
    }
    let (min, instead) = match kind {
        Kind::DualPipeV => (2 * num_ranks, "zb-v"),
        Kind::PipeDream2Bw => (num_ranks, "pipedream"),
        _ => (1, ""),
    };
    if num_microbatches < min {
        return Err(GenerateError::Microbatches { kind, num_ranks, min, found: num_microbatches, instead });
    }
    Ok(())
}
