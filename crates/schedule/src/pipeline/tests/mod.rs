mod asynchronous;
mod automatic;
mod drawing;
mod faults;
mod formulas;
mod goldens;
mod programs;
mod properties;

use super::*;
use proptest::prelude::*;

/// Returns the sizes of a synchronous schedule.
fn sizes(num_ranks: usize, num_microbatches: usize, stages_per_rank: usize) -> Sizes {
    Sizes { num_ranks, num_microbatches, stages_per_rank, num_steps: 1 }
}

/// Costs with equal times of all three passes.
const EQUAL: StageCosts = StageCosts::of(1, 1, 1);

fn equal_costs(sizes: Sizes, stage: StageCosts) -> Costs {
    Costs::equal(sizes.num_ranks * sizes.stages_per_rank, stage).expect("possible costs")
}

/// Returns a schedule that was validated, and its timeline.
fn validated(kind: ScheduleKind, sizes: Sizes, stage: StageCosts) -> (Schedule, Timeline) {
    let costs = equal_costs(sizes, stage);
    let schedule = generate(kind, sizes, &costs, None).expect("sizes that fit");
    assert_eq!(validate(&schedule, &costs, None), Ok(()), "{kind} {sizes:?}\n{schedule}");
    let timeline = simulate(&schedule, &costs).expect("a valid schedule");
    (schedule, timeline)
}

/// Returns whether each stage completes its gradients in microbatch order, and the last stage its losses.
fn sums_are_in_order(schedule: &Schedule) -> bool {
    let microbatches_of = |stage: usize, kind: PassKind| {
        let passes = schedule.ranks[schedule.stage_ranks[stage]].iter();
        let adds = passes.filter(move |pass| {
            pass.stage == stage && (pass.kind == kind || pass.kind == PassKind::Backward)
        });
        adds.map(|pass| pass.microbatch)
    };
    let last = schedule.num_stages() - 1;
    (0..=last).all(|stage| microbatches_of(stage, PassKind::BackwardWeight).is_sorted())
        && microbatches_of(last, PassKind::BackwardInput).is_sorted()
}

/// Returns the kinds that do not depend on costs.
fn fixed_kinds() -> impl Iterator<Item = ScheduleKind> {
    ScheduleKind::ALL.into_iter().filter(|&kind| kind != ScheduleKind::Automatic)
}
