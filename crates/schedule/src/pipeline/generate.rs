//! The entry point to all schedules.

use super::automatic;
use super::costs::Costs;
use super::error::{PassFault, ScheduleError};
use super::kind::{KindSpec, ScheduleKind};
use super::schedule::{PASSES_MAX, Schedule};
use super::sizes::Sizes;
use super::validate::check_activations;

/// The reason why a schedule cannot be generated.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "messages explain the fields")]
pub enum GenerateError {
    #[error(
        "a pipeline needs at least one rank, stage, microbatch and step, and at most {PASSES_MAX} passes; requested: \
         {0:?}. If it has more, use fewer microbatches, or fewer steps between drains"
    )]
    Sizes(Sizes),
    #[error("schedule '{kind}' needs {needed}, not {found}; {remedy}")]
    Unfit { kind: ScheduleKind, needed: String, found: usize, remedy: String },
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    #[error("schedule '{kind}' holds {needed} of activations on rank {rank}, but only {bound} fit; {remedy}")]
    Memory {
        kind: ScheduleKind,
        rank: usize,
        /// Activations that the rank would hold, in the unit of the costs.
        needed: u64,
        bound: u64,
        remedy: &'static str,
    },
}

/// Generates a schedule, and refuses one in which a rank holds more than its bound of `activations_max`. Only [`ScheduleKind::Automatic`]
/// depends on times.
///
/// Cost: linear in the number of passes. [`ScheduleKind::Automatic`] generates and times 10 to 40 schedules. It then improves two or three
/// of them, and times at most 8 million passes for each. This takes up to a second for 64 ranks with 512 microbatches and two stages per
/// rank. It takes milliseconds for small pipelines, or if a fixed schedule takes the least possible time.
///
/// # Errors
/// If the sizes are out of range or do not fit the kind, costs or bounds do not match the sizes, or a rank would exceed its bound.
pub fn generate(
    kind: ScheduleKind,
    sizes: Sizes,
    costs: &Costs,
    activations_max: Option<&[u64]>,
) -> Result<Schedule, GenerateError> {
    check_sizes(sizes)?;
    check_kind(kind, sizes)?;
    let expected = sizes.num_ranks * sizes.stages_per_rank;
    let found = costs.stages().len();
    if expected != found {
        return Err(ScheduleError::CostsDiffer { expected, found }.into());
    }
    if let Some(bounds) = activations_max.filter(|bounds| bounds.len() != sizes.num_ranks) {
        return Err(ScheduleError::BoundsDiffer { expected: sizes.num_ranks, found: bounds.len() }.into());
    }
    if kind == ScheduleKind::Automatic {
        return automatic::schedule(sizes, costs, activations_max);
    }
    let schedule = fixed(kind, sizes);
    match activations_max.map(|bounds| check_activations(&schedule, costs, bounds)) {
        Some(Err(ScheduleError::Pass {
            place,
            fault: PassFault::TooManyActivations { held, bound },
            ..
        })) => {
            let remedy = "choose another schedule (auto respects the bound), recompute more, or use smaller \
                 microbatches";
            Err(GenerateError::Memory { kind, rank: place.rank, needed: held, bound, remedy })
        }
        _ => Ok(schedule),
    }
}

/// Generates a schedule that does not depend on costs. The sizes must fit the kind.
pub(super) fn fixed(kind: ScheduleKind, sizes: Sizes) -> Schedule {
    let Sizes { num_ranks, num_microbatches, stages_per_rank, num_steps } = sizes;
    let KindSpec { passes, placement, weights, .. } = kind.spec();
    let passes = passes.expect("it does not depend on costs");
    Schedule {
        num_microbatches,
        num_steps,
        weights,
        stage_ranks: placement.stage_ranks(num_ranks, stages_per_rank),
        ranks: (0..num_ranks).map(|rank| passes(rank, sizes)).collect(),
    }
}

fn check_sizes(sizes: Sizes) -> Result<(), GenerateError> {
    let Sizes { num_ranks, num_microbatches, stages_per_rank, num_steps } = sizes;
    // At most four passes per stage and microbatch: forward, two halves of backward, an update.
    let factors = [num_ranks, num_microbatches, stages_per_rank, num_steps];
    let num_passes = factors.into_iter().try_fold(4_usize, usize::checked_mul);
    if num_passes.is_some_and(|number| (1..=PASSES_MAX).contains(&number)) {
        Ok(())
    } else {
        Err(GenerateError::Sizes(sizes))
    }
}

/// Checks that a kind fits the sizes.
pub(super) fn check_kind(kind: ScheduleKind, sizes: Sizes) -> Result<(), GenerateError> {
    let Sizes { num_ranks, num_microbatches, stages_per_rank, num_steps } = sizes;
    let unfit = |needed, found, remedy| Err(GenerateError::Unfit { kind, needed, found, remedy });
    if kind.is_synchronous() && num_steps != 1 {
        let remedy = "it drains after each step: choose pipedream or pipedream-2bw".to_owned();
        return unfit("1 step between drains".to_owned(), num_steps, remedy);
    }
    let spec = kind.spec();
    if !spec.stages_per_rank.contains(&stages_per_rank) {
        let several = "interleaved-1f1b, breadth-first or auto";
        let (least, most) = spec.stages_per_rank.into_inner();
        let expected = if most > least { format!("{least} or more") } else { least.to_string() };
        let instead = if stages_per_rank < least { spec.for_one_stage } else { several };
        let remedy = format!("set that, or choose {instead}");
        return unfit(format!("{expected} stages per rank"), stages_per_rank, remedy);
    }
    let min = (spec.microbatches_min)(num_ranks);
    if num_microbatches < min {
        let needed = format!("at least {min} microbatches on {num_ranks} ranks");
        let remedy = format!("raise the global batch size, or choose {}", spec.for_few_microbatches);
        return unfit(needed, num_microbatches, remedy);
    }
    Ok(())
}
