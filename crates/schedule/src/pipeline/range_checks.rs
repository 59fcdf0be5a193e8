//! Checks that must pass before a schedule can be simulated or validated.

use super::costs::Costs;
use super::error::{PassFault, PassIndex, ScheduleError};
use super::schedule::{PASSES_MAX, Schedule};

/// Refuses sizes of 0 or above [`PASSES_MAX`], ranks, stages or microbatches that do not exist, and costs of another number of stages. This
/// bounds the memory of later checks.
pub(super) fn check(schedule: &Schedule, costs: &Costs) -> Result<(), ScheduleError> {
    check_sizes(schedule)?;
    let (expected, found) = (schedule.num_stages(), costs.stages().len());
    if expected != found {
        return Err(ScheduleError::CostsDiffer { expected, found });
    }
    let num_ranks = schedule.num_ranks();
    let misplaced = schedule.stage_ranks.iter().position(|&rank| rank >= num_ranks);
    if let Some(stage) = misplaced {
        return Err(ScheduleError::Placement { stage, rank: schedule.stage_ranks[stage], num_ranks });
    }
    check_passes(schedule)
}

fn check_sizes(schedule: &Schedule) -> Result<(), ScheduleError> {
    let Schedule { num_microbatches, num_steps, .. } = *schedule;
    let (num_stages, num_ranks) = (schedule.num_stages(), schedule.num_ranks());
    let num_forward = num_stages.checked_mul(num_microbatches).and_then(|all| all.checked_mul(num_steps));
    let is_possible = num_forward.is_some_and(|number| (1..=PASSES_MAX / 2).contains(&number));
    let is_right = is_possible && num_ranks > 0 && schedule.num_passes() <= PASSES_MAX;
    if is_right {
        return Ok(());
    }
    Err(ScheduleError::Sizes {
        ranks: num_ranks,
        stages: num_stages,
        microbatches: num_microbatches,
        steps: num_steps,
    })
}

fn check_passes(schedule: &Schedule) -> Result<(), ScheduleError> {
    let (num_stages, num_microbatches) = (schedule.num_stages(), schedule.total_microbatches());
    for (rank, passes) in schedule.ranks.iter().enumerate() {
        for (index, &pass) in passes.iter().enumerate() {
            let fault = if pass.stage >= num_stages || pass.microbatch >= num_microbatches {
                Some(PassFault::OutOfRange { num_stages, num_microbatches })
            } else {
                let expected = schedule.stage_ranks[pass.stage];
                (expected != rank).then_some(PassFault::WrongRank(expected))
            };
            if let Some(fault) = fault {
                return Err(ScheduleError::Pass { place: PassIndex { rank, index }, pass, fault });
            }
        }
    }
    Ok(())
}
