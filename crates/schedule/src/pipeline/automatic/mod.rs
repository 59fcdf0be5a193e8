//! Schedules made for costs and memory (Qi et al., "Zero bubble pipeline parallelism", 2023, section 3).

mod improve;
mod list;

use super::clock::simulate;
use super::costs::Costs;
use super::generate::{GenerateError, Sizes, check_kind, fixed};
use super::kind::Kind;
use super::schedule::{Placement, Schedule};
use super::validate::check_activations;
use improve::improve;

/// The schedule of least simulated time ([`Timeline::makespan`](super::Timeline::makespan)) that keeps to the bounds:
/// the best of all fixed synchronous schedules that fit, of what list scheduling finds by several rules, and of what
/// moving single passes makes of these two. Of equal times the one that holds fewer activations is taken, and a fixed
/// one rather than another.
pub(super) fn schedule(
    sizes: Sizes,
    costs: &Costs,
    activations_max: Option<&[u64]>,
) -> Result<Schedule, GenerateError> {
    let unbounded = vec![u64::MAX; sizes.num_ranks];
    let bounds = activations_max.unwrap_or(&unbounded);
    for &placement in placements(sizes) {
        check_room(&placement.stage_ranks(sizes.num_ranks, sizes.stages_per_rank), costs, bounds)?;
    }
    let kinds = Kind::ALL.into_iter().filter(|&kind| kind != Kind::Automatic && kind.is_synchronous());
    let fixed = kinds.filter(|&kind| check_kind(kind, sizes).is_ok()).map(|kind| fixed(kind, sizes));
    let fitting = fixed.filter(|schedule| check_activations(schedule, costs, bounds).is_ok());
    let searched = placements(sizes).iter().flat_map(|placement| {
        let stage_ranks = placement.stage_ranks(sizes.num_ranks, sizes.stages_per_rank);
        list::Rule::all().map(move |rule| list::schedule(&stage_ranks, sizes, costs, bounds, rule))
    });
    let fixed = fitting.min_by_key(|schedule| score(schedule, costs));
    let searched = searched.min_by_key(|schedule| score(schedule, costs));
    let improved = [&fixed, &searched].map(|schedule| Some(improve(schedule.clone()?, costs, bounds)));
    let all = [fixed, searched].into_iter().chain(improved).flatten();
    let best = all.min_by_key(|schedule| score(schedule, costs));
    Ok(best.expect("list scheduling makes one for each placement"))
}

/// Less is better: the time, then the activations.
fn score(schedule: &Schedule, costs: &Costs) -> (u64, u64) {
    simulate(schedule, costs)
        .map_or((u64::MAX, u64::MAX), |timeline| (timeline.makespan, timeline.activations_max.iter().sum()))
}

/// With one stage a rank, folding changes nothing.
fn placements(sizes: Sizes) -> &'static [Placement] {
    let all = &[Placement::Looped, Placement::Folded];
    if sizes.stages_per_rank == 1 { &all[..1] } else { all }
}

/// A rank must be able to hold one microbatch in all of its stages.
fn check_room(stage_ranks: &[usize], costs: &Costs, bounds: &[u64]) -> Result<(), GenerateError> {
    for (rank, &bound) in bounds.iter().enumerate() {
        let stages = stage_ranks.iter().zip(costs.stages()).filter(|&(&other, _)| other == rank);
        let needed: u64 = stages.map(|(_, stage)| stage.activation).sum();
        if needed > bound {
            let remedy = "that is one microbatch: recompute more, take smaller microbatches, or more ranks";
            return Err(GenerateError::Memory { kind: Kind::Automatic, rank, needed, bound, remedy });
        }
    }
    Ok(())
}
