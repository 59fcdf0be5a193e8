//! List scheduling: whenever a rank is free, it begins the pass that a rule prefers among the passes that are ready and fit its memory.

use crate::pipeline::costs::Costs;
use crate::pipeline::pass::{Pass, PassKind};
use crate::pipeline::schedule::{Schedule, WeightVersions};
use crate::pipeline::sizes::Sizes;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// A rule by which a rank prefers passes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rule {
    /// Whether forward comes before backward if both are ready.
    is_forward_first: bool,
    /// Maximum delay that a weight half may cause to another pass whose arrival is known, in percent of the time of the weight half.
    overrun_percent: u64,
    /// Part of the memory beyond one microbatch that a rank may use, in percent.
    memory_percent: u64,
}

impl Rule {
    /// Returns the rules to try, in groups. The rules of a group differ only in memory, the least memory first. No rule is best for all
    /// costs.
    pub(super) fn groups() -> impl Iterator<Item = [Rule; 3]> {
        [false, true].into_iter().flat_map(|is_forward_first| {
            [0, 50, 100].into_iter().map(move |overrun_percent| {
                [50, 75, 100].map(|memory_percent| Rule { is_forward_first, overrun_percent, memory_percent })
            })
        })
    }
}

pub(super) struct ListResult {
    /// The schedule; `None` if it would take longer than the maximum.
    pub(super) schedule: Option<Schedule>,
    /// Whether a pass had to wait for memory. If not, the rule gives the same schedule with more memory.
    pub(super) lacked_room: bool,
}

/// Returns the schedule of a rule, if it takes at most `makespan_max` ticks. Every rank must have memory for one microbatch in all of its
/// stages. Beyond that, a rank begins a microbatch only if it can still finish the oldest microbatch that it has begun, so the schedule
/// never deadlocks.
pub(super) fn schedule(
    stage_ranks: &[usize],
    sizes: Sizes,
    costs: &Costs,
    bounds: &[u64],
    rule: Rule,
    makespan_max: u64,
) -> ListResult {
    let mut search = ListScheduler::new(stage_ranks, sizes, costs, bounds, rule);
    while let Some(Reverse((now, rank))) = search.wakes.pop() {
        if search.ranks[rank].free_at > now {
            continue;
        }
        if now + search.ranks[rank].ticks_left > makespan_max {
            return ListResult { schedule: None, lacked_room: search.lacked_room };
        }
        search.begin_best(rank, now);
    }
    let schedule = Schedule {
        num_microbatches: sizes.num_microbatches,
        num_steps: 1,
        weights: WeightVersions::Drained,
        stage_ranks: stage_ranks.to_vec(),
        ranks: search.ranks.into_iter().map(|rank| rank.passes).collect(),
    };
    ListResult { schedule: Some(schedule), lacked_room: search.lacked_room }
}

/// A time that is not known yet.
const UNKNOWN: u64 = u64::MAX;

struct RankState {
    /// Stages of the rank, in model order.
    stages: Vec<usize>,
    /// Maximum activations that the rank holds under the rule.
    bound: u64,
    held: u64,
    free_at: u64,
    /// Total ticks of the passes that have not begun.
    ticks_left: u64,
    /// Weight halves that are ready, the oldest first.
    weight_halves: VecDeque<Pass>,
    passes: Vec<Pass>,
}

struct ListScheduler<'a> {
    costs: &'a Costs,
    stage_ranks: &'a [usize],
    num_microbatches: usize,
    rule: Rule,
    ranks: Vec<RankState>,
    /// Next microbatch of forward, by stage.
    num_forward: Vec<usize>,
    /// Next microbatch of backward, by stage.
    num_backward: Vec<usize>,
    /// Time at which the input is available, by stage and microbatch. Each stage has one more element than there are microbatches, for a
    /// microbatch that is never available.
    input_at: Vec<u64>,
    /// Time at which the gradient of the output is available, indexed as `input_at`.
    gradient_at: Vec<u64>,
    /// Times at which a rank may be able to begin a pass.
    wakes: BinaryHeap<Reverse<(u64, usize)>>,
    /// Whether a forward had to wait for memory.
    lacked_room: bool,
}

impl<'a> ListScheduler<'a> {
    fn new(stage_ranks: &'a [usize], sizes: Sizes, costs: &'a Costs, bounds: &[u64], rule: Rule) -> Self {
        let num_microbatches = sizes.num_microbatches;
        let rank = |rank: usize| {
            let stages: Vec<usize> =
                (0..stage_ranks.len()).filter(|&stage| stage_ranks[stage] == rank).collect();
            let one: u64 = stages.iter().map(|&stage| costs.stages()[stage].activation).sum();
            let useful = bounds[rank].min(one * num_microbatches as u64);
            let bound = one + (u128::from(useful - one) * u128::from(rule.memory_percent) / 100) as u64;
            let ticks: u64 = stages.iter().map(|&stage| costs.stages()[stage].total()).sum();
            RankState {
                bound,
                held: 0,
                free_at: 0,
                ticks_left: ticks * num_microbatches as u64,
                weight_halves: VecDeque::new(),
                passes: Vec::with_capacity(3 * stages.len() * num_microbatches),
                stages,
            }
        };
        let unknown = vec![UNKNOWN; stage_ranks.len() * (num_microbatches + 1)];
        let mut input_at = unknown.clone();
        input_at[..num_microbatches].fill(0);
        ListScheduler {
            costs,
            stage_ranks,
            num_microbatches,
            rule,
            ranks: (0..sizes.num_ranks).map(rank).collect(),
            num_forward: vec![0; stage_ranks.len()],
            num_backward: vec![0; stage_ranks.len()],
            input_at,
            gradient_at: unknown,
            wakes: (0..sizes.num_ranks).map(|rank| Reverse((0, rank))).collect(),
            lacked_room: false,
        }
    }

    /// Begins the pass that the rule prefers, or waits for a pass that is not ready.
    fn begin_best(&mut self, rank: usize, now: u64) {
        let (backward_at, backward) = self.next_backward(rank);
        let (forward_at, forward) = self.next_forward(rank);
        let (backward_is_ready, forward_is_ready) = (backward_at <= now, forward_at <= now);
        let pass = if forward_is_ready && (self.rule.is_forward_first || !backward_is_ready) {
            Some(Pass::forward(forward, self.num_forward[forward]))
        } else if backward_is_ready {
            Some(Pass::backward_input(backward, self.num_backward[backward]))
        } else {
            self.weight_half(rank, now, forward_at.min(backward_at))
        };
        if let Some(pass) = pass {
            self.begin(rank, now, pass);
        }
    }

    /// Returns the time and the stage of the rank's next backward to become ready. Of equal times, the lowest stage is first, which is the
    /// farthest along the backward path.
    fn next_backward(&self, rank: usize) -> (u64, usize) {
        let at = |&stage: &usize| (self.gradient_at[self.index(stage, self.num_backward[stage])], stage);
        self.ranks[rank].stages.iter().map(at).min().unwrap_or((UNKNOWN, 0))
    }

    /// Returns the time and the stage of the rank's next forward to become ready among those that fit its memory. Of equal times, the
    /// highest stage is first. Sets `lacked_room` if a forward has to wait for memory.
    fn next_forward(&mut self, rank: usize) -> (u64, usize) {
        let mut first = (UNKNOWN, 0);
        for &stage in self.ranks[rank].stages.iter().rev() {
            let microbatch = self.num_forward[stage];
            let at = self.input_at[self.index(stage, microbatch)];
            if at >= first.0 {
                continue;
            }
            if self.has_room(rank, stage, microbatch) {
                first = (at, stage);
            } else {
                self.lacked_room = true;
            }
        }
        first
    }

    /// Returns whether forward of `microbatch` on `stage` leaves enough memory to complete the oldest microbatch whose forward has not
    /// begun on all stages of the rank. Earlier microbatches can finish with the memory that they hold.
    fn has_room(&self, rank: usize, stage: usize, microbatch: usize) -> bool {
        let RankState { stages, bound, held, .. } = &self.ranks[rank];
        let activation = |&stage: &usize| self.costs.stages()[stage].activation;
        let oldest = stages.iter().map(|&stage| self.num_forward[stage]).min().unwrap_or(0);
        let is_pending = |stage: &&usize| self.num_forward[**stage] == oldest;
        let reserved: u64 = stages.iter().filter(is_pending).map(activation).sum();
        let taken = if microbatch == oldest { 0 } else { activation(&stage) };
        held + reserved + taken <= *bound
    }

    /// Returns the oldest weight half, unless it would delay a pass that arrives at `arrival` by more than the rule allows.
    fn weight_half(&self, rank: usize, now: u64, arrival: u64) -> Option<Pass> {
        let &pass = self.ranks[rank].weight_halves.front()?;
        let ticks = self.costs.ticks(pass);
        let overrun = (now + ticks).saturating_sub(arrival);
        (100 * u128::from(overrun) <= u128::from(ticks) * u128::from(self.rule.overrun_percent))
            .then_some(pass)
    }

    fn begin(&mut self, rank: usize, now: u64, pass: Pass) {
        let end = now + self.costs.ticks(pass);
        let (taken, freed) = self.costs.activations(pass);
        let state = &mut self.ranks[rank];
        state.held = state.held + taken - freed;
        state.free_at = end;
        state.ticks_left -= end - now;
        state.passes.push(pass);
        self.wakes.push(Reverse((end, rank)));
        let Pass { kind, stage, microbatch } = pass;
        match kind {
            PassKind::Forward => self.num_forward[stage] += 1,
            PassKind::BackwardInput => {
                self.num_backward[stage] += 1;
                self.ranks[rank].weight_halves.push_back(Pass::backward_weight(stage, microbatch));
            }
            _ => {
                self.ranks[rank].weight_halves.pop_front();
            }
        }
        let num_stages = self.stage_ranks.len();
        if kind == PassKind::Forward && stage + 1 == num_stages {
            let index = self.index(stage, microbatch);
            self.gradient_at[index] = end;
        }
        if let Some(next) = pass.result_goes_to(num_stages) {
            let to = self.stage_ranks[next];
            let at = if to == rank { end } else { end + self.costs.send_ticks() };
            let index = self.index(next, microbatch);
            let times = if kind == PassKind::Forward { &mut self.input_at } else { &mut self.gradient_at };
            times[index] = at;
            // A rank that is busy until then is woken at the end of its current pass.
            if self.ranks[to].free_at < at {
                self.wakes.push(Reverse((at, to)));
            }
        }
    }

    fn index(&self, stage: usize, microbatch: usize) -> usize {
        stage * (self.num_microbatches + 1) + microbatch
    }
}
