//! Local search over a schedule: what holds up the end is moved out of the way. Only passes on the critical path
//! matter, and of these only the order within a block that one rank runs without a gap (van Laarhoven, Aarts and
//! Lenstra, "Job shop scheduling by simulated annealing", 1992; here only what is better is taken, so it ends).

use crate::pipeline::clock::{needs, simulate};
use crate::pipeline::costs::Costs;
use crate::pipeline::pass::{Pass, PassKind};
use crate::pipeline::schedule::Schedule;
use crate::pipeline::timeline::Timeline;
use crate::pipeline::validate::check_activations;
use std::ops::RangeInclusive;

/// Passes that are timed at most, over all moves that are tried: a fraction of a second.
const PASSES_TIMED_MAX: usize = 1 << 24;

/// Less is better: the makespan, then the sum of the ranks' ends, which leads on where the makespan does not change.
type Score = (u64, u64);

fn score(timeline: &Timeline) -> Score {
    let ends = timeline.ranks.iter().filter_map(|spans| spans.last()).map(|span| span.end);
    (timeline.makespan, ends.sum())
}

/// Moves passes of a valid schedule until no move helps, or the effort has been spent.
pub(super) fn improve(schedule: Schedule, costs: &Costs, bounds: &[u64]) -> Schedule {
    let mut num_left = PASSES_TIMED_MAX / schedule.num_passes();
    let mut schedule = halved(schedule);
    while let Some(better) = better_neighbour(&schedule, costs, bounds, &mut num_left) {
        schedule = better;
    }
    schedule
}

/// The same with all backwards in two halves, one directly after the other.
fn halved(mut schedule: Schedule) -> Schedule {
    let halves = |pass: Pass| match pass.kind {
        PassKind::Backward => vec![
            Pass::backward_input(pass.stage, pass.microbatch),
            Pass::backward_weight(pass.stage, pass.microbatch),
        ],
        _ => vec![pass],
    };
    for passes in &mut schedule.ranks {
        *passes = passes.iter().copied().flat_map(halves).collect();
    }
    schedule
}

/// The first schedule found that is better, by moving one pass to the begin or the end of its critical block.
fn better_neighbour(
    schedule: &Schedule,
    costs: &Costs,
    bounds: &[u64],
    num_left: &mut usize,
) -> Option<Schedule> {
    let timeline = simulate(schedule, costs).ok()?;
    let before = score(&timeline);
    let mut candidate = schedule.clone();
    for (rank, block) in critical_blocks(schedule, &timeline, costs) {
        let (first, last) = block.into_inner();
        let moves = (first..=last).flat_map(|from| [(from, first), (from, last)]);
        for (from, to) in moves {
            if !leads_elsewhere(&schedule.ranks[rank], from, to) {
                continue;
            }
            *num_left = num_left.checked_sub(1)?;
            move_pass(&mut candidate.ranks[rank], from, to);
            // Only what can run has activations that can be counted.
            if simulate(&candidate, costs).is_ok_and(|timeline| score(&timeline) < before)
                && check_activations(&candidate, costs, bounds).is_ok()
            {
                return Some(candidate);
            }
            move_pass(&mut candidate.ranks[rank], to, from);
        }
    }
    None
}

/// Moves a pass, place by place. Passes of one kind and stage stay in the order of microbatches, in which sums are made: they
/// take equal time, so whichever comes to the other one's place is the one that is moved on. Moving back undoes it.
fn move_pass(passes: &mut [Pass], from: usize, to: usize) {
    let mut place = from;
    while place != to {
        let next = step(place, to);
        if !is_alike(passes[place], passes[next]) {
            passes.swap(place, next);
        }
        place = next;
    }
}

/// Whether a move is another one than that of the pass beside it.
fn leads_elsewhere(passes: &[Pass], from: usize, to: usize) -> bool {
    from != to && !is_alike(passes[from], passes[step(from, to)])
}

fn step(place: usize, to: usize) -> usize {
    if place < to { place + 1 } else { place - 1 }
}

fn is_alike(pass: Pass, other: Pass) -> bool {
    (pass.kind, pass.stage) == (other.kind, other.stage)
}

/// One critical path, from its end to its begin: for each rank that it crosses, the passes that the rank runs without
/// a gap.
fn critical_blocks(
    schedule: &Schedule,
    timeline: &Timeline,
    costs: &Costs,
) -> Vec<(usize, RangeInclusive<usize>)> {
    let position = Positions::new(schedule);
    let end_of = |rank: usize| timeline.ranks[rank].last().map_or(0, |span| span.end);
    let mut rank = (0..schedule.num_ranks()).max_by_key(|&rank| end_of(rank)).unwrap_or(0);
    let mut last = schedule.ranks[rank].len() - 1;
    let mut blocks = Vec::new();
    loop {
        let spans = &timeline.ranks[rank];
        let mut first = last;
        while first > 0 && spans[first - 1].end == spans[first].start {
            first -= 1;
        }
        blocks.push((rank, first..=last));
        let pass = schedule.ranks[rank][first];
        let awaited = needs(pass, schedule.num_stages()).into_iter().flatten().find_map(|needed| {
            let (other, index) = position.of(schedule, needed)?;
            let arrival = timeline.ranks[other].get(index)?.end + costs.send();
            (other != rank && arrival == spans[first].start).then_some((other, index))
        });
        match awaited {
            Some(place) => (rank, last) = place,
            None => return blocks,
        }
    }
}

/// Where the passes stand whose results others need.
struct Positions {
    num_microbatches: usize,
    forward: Vec<usize>,
    gradient: Vec<usize>,
}

impl Positions {
    fn new(schedule: &Schedule) -> Self {
        let num_microbatches = schedule.num_microbatches;
        let mut forward = vec![usize::MAX; schedule.num_stages() * num_microbatches];
        let mut gradient = forward.clone();
        for passes in &schedule.ranks {
            for (index, pass) in passes.iter().enumerate() {
                let key = pass.stage * num_microbatches + pass.microbatch;
                match pass.kind {
                    PassKind::Forward => forward[key] = index,
                    PassKind::Backward | PassKind::BackwardInput => gradient[key] = index,
                    PassKind::BackwardWeight | PassKind::Update => {}
                }
            }
        }
        Positions { num_microbatches, forward, gradient }
    }

    fn of(&self, schedule: &Schedule, pass: Pass) -> Option<(usize, usize)> {
        let positions = if pass.kind == PassKind::Forward { &self.forward } else { &self.gradient };
        let index = *positions.get(pass.stage * self.num_microbatches + pass.microbatch)?;
        Some((schedule.stage_ranks[pass.stage], index))
    }
}
