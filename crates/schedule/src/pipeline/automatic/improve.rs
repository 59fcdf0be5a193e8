//! Local search that shortens a schedule by moving passes on its critical path. A move can help only if it changes the order of passes
//! within a block: consecutive passes of the critical path that one rank runs without a gap (van Laarhoven, Aarts and Lenstra, "Job shop
//! scheduling by simulated annealing", 1992; here only improvements are accepted, so the search ends).

use crate::pipeline::clock::{Clock, needs};
use crate::pipeline::costs::Costs;
use crate::pipeline::pass::{Pass, PassKind};
use crate::pipeline::schedule::Schedule;
use crate::pipeline::timeline::PassInterval;
use crate::pipeline::validate::check_activations;
use std::ops::RangeInclusive;

/// Maximum number of passes that are timed over all tried moves. Timing them takes a fraction of a second.
const PASSES_TIMED_MAX: usize = 1 << 23;

/// The score of a schedule, lower is better: the makespan, then the sum of the ranks' ends, which guides the search where the makespan does
/// not change.
type Score = (u64, u64);

fn score(spans: &[Vec<PassInterval>]) -> Score {
    let ends = || spans.iter().filter_map(|spans| spans.last()).map(|span| span.end);
    (ends().max().unwrap_or(0), ends().sum())
}

/// Moves passes of a valid schedule until no move improves it or [`PASSES_TIMED_MAX`] is reached.
pub(super) fn improve(schedule: Schedule, costs: &Costs, bounds: &[u64]) -> Schedule {
    let mut search = Search::new(split_backwards(schedule), costs, bounds);
    while search.improve_once().is_some() {}
    search.schedule
}

/// Returns the schedule with all backwards in two halves, one directly after the other.
fn split_backwards(mut schedule: Schedule) -> Schedule {
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

struct Search<'a> {
    schedule: Schedule,
    intervals: Vec<Vec<PassInterval>>,
    clock: Clock<'a>,
    costs: &'a Costs,
    bounds: &'a [u64],
    /// Passes that may still be timed.
    num_left: usize,
}

impl<'a> Search<'a> {
    fn new(schedule: Schedule, costs: &'a Costs, bounds: &'a [u64]) -> Self {
        let mut clock = Clock::new(&schedule, costs);
        clock.run(&schedule);
        let intervals = clock.intervals.clone();
        Search { schedule, intervals, clock, costs, bounds, num_left: PASSES_TIMED_MAX }
    }

    /// Tries to move each pass to an end of its critical block, and makes the first move that improves the schedule. Returns `None` if no
    /// move improves it, or if too few passes may still be timed.
    fn improve_once(&mut self) -> Option<()> {
        for (rank, block) in critical_blocks(&self.schedule, &self.intervals, self.costs) {
            let (first, last) = block.into_inner();
            for (from, to) in (first..=last).flat_map(|from| [(from, first), (from, last)]) {
                if is_distinct_move(&self.schedule.ranks[rank], from, to) && self.try_move(rank, from, to)? {
                    return Some(());
                }
            }
        }
        None
    }

    /// Moves a pass, and undoes the move unless it improves the schedule. Passes that begin before the first moved pass keep their times.
    /// Returns whether the schedule improved, or `None` if too few passes may still be timed.
    fn try_move(&mut self, rank: usize, from: usize, to: usize) -> Option<bool> {
        let time = self.intervals[rank][from.min(to)].start;
        let is_earlier = |spans: &Vec<PassInterval>| spans.partition_point(|span| span.start < time);
        let num_kept: Vec<usize> = self.intervals.iter().map(is_earlier).collect();
        let num_timed = self.schedule.num_passes() - num_kept.iter().sum::<usize>();
        self.num_left = self.num_left.checked_sub(num_timed)?;
        self.clock.rewind(&self.schedule, &num_kept);
        move_pass(&mut self.schedule.ranks[rank], from, to);
        self.clock.run(&self.schedule);
        let has_run =
            self.clock.intervals.iter().zip(&self.intervals).all(|(new, old)| new.len() == old.len());
        // Only a schedule that runs to its end has activations that can be counted.
        let is_better = has_run
            && score(&self.clock.intervals) < score(&self.intervals)
            && check_activations(&self.schedule, self.costs, self.bounds).is_ok();
        if is_better {
            for ((spans, new), num_kept) in self.intervals.iter_mut().zip(&self.clock.intervals).zip(num_kept)
            {
                spans[num_kept..].copy_from_slice(&new[num_kept..]);
            }
        } else {
            self.clock.rewind(&self.schedule, &num_kept);
            move_pass(&mut self.schedule.ranks[rank], to, from);
            self.clock.replay(&self.schedule, &self.intervals);
        }
        Some(is_better)
    }
}

/// Moves a pass, one place at a time. Passes of one kind and stage take equal time, and must stay in the order of microbatches, in which
/// gradients are summed. When a pass reaches another pass of its kind and stage, the two are therefore not swapped, and the other pass is
/// moved instead. Moving from `to` to `from` undoes the move.
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

/// Returns whether a move has an effect of its own. If the neighboring pass on the way has the same kind and stage, moving that pass gives
/// the same schedule.
fn is_distinct_move(passes: &[Pass], from: usize, to: usize) -> bool {
    from != to && !is_alike(passes[from], passes[step(from, to)])
}

fn step(place: usize, to: usize) -> usize {
    if place < to { place + 1 } else { place - 1 }
}

fn is_alike(pass: Pass, other: Pass) -> bool {
    (pass.kind, pass.stage) == (other.kind, other.stage)
}

/// Returns one critical path, from its end to its beginning: for each rank on the path, a block of passes that the rank runs without a gap.
fn critical_blocks(
    schedule: &Schedule,
    spans: &[Vec<PassInterval>],
    costs: &Costs,
) -> Vec<(usize, RangeInclusive<usize>)> {
    let end_of = |rank: usize| spans[rank].last().map_or(0, |span| span.end);
    let mut rank = (0..schedule.num_ranks()).max_by_key(|&rank| end_of(rank)).unwrap_or(0);
    let mut last = schedule.ranks[rank].len() - 1;
    let mut blocks = Vec::new();
    loop {
        let mut first = last;
        while first > 0 && spans[rank][first - 1].end == spans[rank][first].start {
            first -= 1;
        }
        blocks.push((rank, first..=last));
        let pass = schedule.ranks[rank][first];
        let sent = spans[rank][first].start.checked_sub(costs.send_ticks());
        let awaited = needs(pass, schedule.num_stages()).into_iter().flatten().find_map(|needed| {
            let other = schedule.stage_ranks[needed.stage];
            let index = ended_at(&schedule.ranks[other], &spans[other], needed, sent?)?;
            (other != rank).then_some((other, index))
        });
        match awaited {
            Some(place) => (rank, last) = place,
            None => return blocks,
        }
    }
}

/// Returns the index of `pass` among the passes of its rank, if it ends at `time`. The passes contain no full backward, so for a full
/// backward the function looks for its input half.
fn ended_at(passes: &[Pass], spans: &[PassInterval], pass: Pass, time: u64) -> Option<usize> {
    let made = match pass.kind {
        PassKind::Backward => Pass { kind: PassKind::BackwardInput, ..pass },
        _ => pass,
    };
    let begin = spans.partition_point(|span| span.end < time);
    let ended = spans[begin..].iter().take_while(|span| span.end == time).count();
    (begin..begin + ended).find(|&index| passes[index] == made)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pipeline::{ScheduleKind, Sizes, StageCosts, generate, simulate};

    /// A move times only the passes that it affects. The times must nevertheless be equal to the times of the whole schedule.
    #[test]
    fn incremental_times_match_a_full_simulation() {
        let stage = |stage: u64| StageCosts::of(20 + 7 * stage % 5, 18 + 3 * stage % 7, 15 + 5 * stage % 9);
        let costs = Costs::new((0..8).map(stage).collect(), 2).expect("possible costs");
        let sizes = Sizes { num_ranks: 4, num_microbatches: 8, stages_per_rank: 2, num_steps: 1 };
        let zero_bubble = generate(ScheduleKind::ZeroBubbleV, sizes, &costs, None).expect("sizes that fit");
        let mut search = Search::new(split_backwards(zero_bubble), &costs, &[u64::MAX; 4]);
        let mut num_moves = 0;
        while search.improve_once().is_some() {
            num_moves += 1;
            let timeline = simulate(&search.schedule, &costs).expect("a valid schedule");
            assert_eq!(search.intervals, timeline.ranks, "after {num_moves} moves");
            assert_eq!(search.clock.intervals, timeline.ranks, "after {num_moves} moves");
        }
        assert!(num_moves > 3, "{num_moves}");
    }
}
