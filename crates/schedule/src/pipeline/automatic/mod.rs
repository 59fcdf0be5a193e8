//! Schedules generated for given costs and memory (Qi et al., "Zero bubble pipeline parallelism", 2023, section 3).

mod improve;
mod list;

use super::clock::simulate;
use super::costs::Costs;
use super::generate::{GenerateError, check_kind, fixed};
use super::kind::ScheduleKind;
use super::schedule::{Schedule, StagePlacement};
use super::sizes::Sizes;
use super::validate::check_activations;
use improve::improve;

/// Returns the schedule of least simulated time ([`Timeline::makespan`](super::Timeline::makespan)) within the bounds. The candidates are
/// the best fixed synchronous schedule and, for each placement, the best schedule that list scheduling finds by several rules. If no
/// candidate takes the least possible time, each candidate is also improved by moves of single passes. Among schedules of equal time, the
/// one with the fewest activations is returned, and a fixed schedule if these are equal, too.
pub(super) fn schedule(
    sizes: Sizes,
    costs: &Costs,
    activations_max: Option<&[u64]>,
) -> Result<Schedule, GenerateError> {
    let unbounded = vec![u64::MAX; sizes.num_ranks];
    let bounds = activations_max.unwrap_or(&unbounded);
    let placements = placements(sizes);
    for stage_ranks in &placements {
        check_room(stage_ranks, costs, bounds)?;
    }
    let least = placements.iter().map(|stage_ranks| makespan_min(stage_ranks, sizes, costs)).min();
    let listed = placements.iter().filter_map(|stage_ranks| best_listed(stage_ranks, sizes, costs, bounds));
    let mut found: Vec<Timed> = best_fixed(sizes, costs, bounds).into_iter().chain(listed).collect();
    if found.iter().all(|timed| Some(timed.score.0) != least) {
        let improved = |timed: &Timed| Timed::new(improve(timed.schedule.clone(), costs, bounds), costs);
        found.extend(found.iter().filter_map(improved).collect::<Vec<_>>());
    }
    let best = found.into_iter().min_by_key(|timed| timed.score);
    Ok(best.expect("list scheduling makes one for each placement").schedule)
}

/// A schedule and its score, lower is better: the time, then the activations.
struct Timed {
    schedule: Schedule,
    score: (u64, u64),
}

impl Timed {
    fn new(schedule: Schedule, costs: &Costs) -> Option<Timed> {
        let timeline = simulate(&schedule, costs).ok()?;
        let score = (timeline.makespan, timeline.activations_max.iter().sum());
        Some(Timed { schedule, score })
    }
}

fn best_fixed(sizes: Sizes, costs: &Costs, bounds: &[u64]) -> Option<Timed> {
    let kinds =
        ScheduleKind::synchronous(sizes.stages_per_rank).filter(|&(kind, _)| kind != ScheduleKind::Automatic);
    let kinds = kinds.filter(|&(kind, stages_per_rank)| {
        stages_per_rank == sizes.stages_per_rank && check_kind(kind, sizes).is_ok()
    });
    let fixed = kinds.map(|(kind, _)| fixed(kind, sizes));
    let fitting = fixed.filter(|schedule| check_activations(schedule, costs, bounds).is_ok());
    fitting.filter_map(|schedule| Timed::new(schedule, costs)).min_by_key(|timed| timed.score)
}

fn best_listed(stage_ranks: &[usize], sizes: Sizes, costs: &Costs, bounds: &[u64]) -> Option<Timed> {
    let mut best: Option<Timed> = None;
    for rules in list::Rule::groups() {
        for rule in rules {
            let makespan_max = best.as_ref().map_or(u64::MAX, |timed| timed.score.0);
            let listed = list::schedule(stage_ranks, sizes, costs, bounds, rule, makespan_max);
            let timed = listed.schedule.and_then(|schedule| Timed::new(schedule, costs));
            best = best.into_iter().chain(timed).min_by_key(|timed| timed.score);
            if !listed.lacked_room {
                break;
            }
        }
    }
    best
}

/// Returns a lower bound on the makespan: a rank begins no earlier than the first microbatch can reach it, and then runs all of its passes.
fn makespan_min(stage_ranks: &[usize], sizes: Sizes, costs: &Costs) -> u64 {
    let mut arrival = 0;
    let mut earliest = vec![u64::MAX; sizes.num_ranks];
    let mut work = vec![0; sizes.num_ranks];
    for (stage, (&rank, stage_costs)) in stage_ranks.iter().zip(costs.stages()).enumerate() {
        earliest[rank] = arrival.min(earliest[rank]);
        work[rank] += stage_costs.total() * sizes.num_microbatches as u64;
        let is_same_rank = stage_ranks.get(stage + 1) == Some(&rank);
        arrival += stage_costs.forward + if is_same_rank { 0 } else { costs.send_ticks() };
    }
    earliest.into_iter().zip(work).map(|(earliest, work)| earliest + work).max().unwrap_or(0)
}

/// Returns the placements of stages to try. With one stage per rank, both placements are the same.
fn placements(sizes: Sizes) -> Vec<Vec<usize>> {
    let Sizes { num_ranks, stages_per_rank, .. } = sizes;
    let all = [StagePlacement::Looped, StagePlacement::Folded]
        .map(|all| all.stage_ranks(num_ranks, stages_per_rank));
    all.into_iter().take(stages_per_rank.min(2)).collect()
}

/// Checks that every rank can hold one microbatch in all of its stages.
fn check_room(stage_ranks: &[usize], costs: &Costs, bounds: &[u64]) -> Result<(), GenerateError> {
    for (rank, &bound) in bounds.iter().enumerate() {
        let stages = stage_ranks.iter().zip(costs.stages()).filter(|&(&other, _)| other == rank);
        let needed: u64 = stages.map(|(_, stage)| stage.activation).sum();
        if needed > bound {
            let remedy = "one microbatch alone needs that much: recompute more, use smaller microbatches, or use more ranks";
            return Err(GenerateError::Memory { kind: ScheduleKind::Automatic, rank, needed, bound, remedy });
        }
    }
    Ok(())
}
