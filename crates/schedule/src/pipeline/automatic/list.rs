//! List scheduling: whenever a rank is free, it begins the best pass by a rule among those that are ready and fit its memory.

use crate::pipeline::costs::Costs;
use crate::pipeline::pass::{Pass, PassKind};
use crate::pipeline::schedule::{Schedule, WeightVersions};
use crate::pipeline::sizes::Sizes;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// What a rank likes best.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rule {
    /// Forward before backward, if both are ready.
    is_forward_first: bool,
    /// How much of a weight half may run over into the time of a pass that is known to be ready by then, in percent.
    overrun_percent: u64,
    /// How much of the memory beyond one microbatch is used, in percent.
    memory_percent: u64,
}

impl Rule {
    /// The rules that are tried, in groups that differ in memory alone, the least first. None of them is best for all costs.
    pub(super) fn groups() -> impl Iterator<Item = [Rule; 3]> {
        [false, true].into_iter().flat_map(|is_forward_first| {
            [0, 50, 100].into_iter().map(move |overrun_percent| {
                [50, 75, 100].map(|memory_percent| Rule { is_forward_first, overrun_percent, memory_percent })
            })
        })
    }
}

pub(super) struct Listed {
    /// The schedule; `None` if it would take longer than what was found before.
    pub(super) schedule: Option<Schedule>,
    /// Whether a pass had to wait for memory. If none had to, more memory changes nothing.
    pub(super) lacked_room: bool,
}

/// The schedule that a rule makes, in `makespan_max` ticks. Every rank must have room for one microbatch in all of its stages;
/// beyond that it begins a microbatch only if it could still finish the oldest that it has begun, so it never comes to a stop.
pub(super) fn schedule(
    stage_ranks: &[usize],
    sizes: Sizes,
    costs: &Costs,
    bounds: &[u64],
    rule: Rule,
    makespan_max: u64,
) -> Listed {
    let mut search = Search::new(stage_ranks, sizes, costs, bounds, rule);
    while let Some(Reverse((now, rank))) = search.wakes.pop() {
        if search.ranks[rank].free_at > now {
            continue;
        }
        if now + search.ranks[rank].ticks_left > makespan_max {
            return Listed { schedule: None, lacked_room: search.lacked_room };
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
    Listed { schedule: Some(schedule), lacked_room: search.lacked_room }
}

/// No time is known.
const UNKNOWN: u64 = u64::MAX;

struct Rank {
    /// Its stages, in the model's order.
    stages: Vec<usize>,
    /// What of its memory it uses.
    bound: u64,
    held: u64,
    free_at: u64,
    /// Of all passes that it has not begun.
    ticks_left: u64,
    /// Weight halves that could run, the oldest first.
    weight_halves: VecDeque<Pass>,
    passes: Vec<Pass>,
}

struct Search<'a> {
    costs: &'a Costs,
    stage_ranks: &'a [usize],
    num_microbatches: usize,
    rule: Rule,
    ranks: Vec<Rank>,
    /// By stage: the next microbatch of each direction.
    num_forward: Vec<usize>,
    num_backward: Vec<usize>,
    /// By stage and microbatch: when the input and the gradient of the result are at hand. A last microbatch of each stage never is.
    input_at: Vec<u64>,
    gradient_at: Vec<u64>,
    /// When to look at a rank.
    wakes: BinaryHeap<Reverse<(u64, usize)>>,
    /// Whether a forward had to wait for memory.
    lacked_room: bool,
}

impl<'a> Search<'a> {
    fn new(stage_ranks: &'a [usize], sizes: Sizes, costs: &'a Costs, bounds: &[u64], rule: Rule) -> Self {
        let num_microbatches = sizes.num_microbatches;
        let rank = |rank: usize| {
            let stages: Vec<usize> =
                (0..stage_ranks.len()).filter(|&stage| stage_ranks[stage] == rank).collect();
            let one: u64 = stages.iter().map(|&stage| costs.stages()[stage].activation).sum();
            let useful = bounds[rank].min(one * num_microbatches as u64);
            let bound = one + (u128::from(useful - one) * u128::from(rule.memory_percent) / 100) as u64;
            let ticks: u64 = stages.iter().map(|&stage| costs.stages()[stage].total()).sum();
            Rank {
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
        Search {
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

    /// Begins what the rule likes best, or waits for what is on its way.
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

    /// The first of the next backwards of a rank's stages to be at hand, of equal ones the farthest along its way: time and stage.
    fn next_backward(&self, rank: usize) -> (u64, usize) {
        let at = |&stage: &usize| (self.gradient_at[self.index(stage, self.num_backward[stage])], stage);
        self.ranks[rank].stages.iter().map(at).min().unwrap_or((UNKNOWN, 0))
    }

    /// The same for forwards that there is room for.
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

    /// Whether forward leaves room for the oldest microbatch that some stages of the rank have not seen. Older ones can all finish.
    fn has_room(&self, rank: usize, stage: usize, microbatch: usize) -> bool {
        let Rank { stages, bound, held, .. } = &self.ranks[rank];
        let activation = |&stage: &usize| self.costs.stages()[stage].activation;
        let oldest = stages.iter().map(|&stage| self.num_forward[stage]).min().unwrap_or(0);
        let is_ahead = |stage: &&usize| self.num_forward[**stage] == oldest;
        let reserved: u64 = stages.iter().filter(is_ahead).map(activation).sum();
        let taken = if microbatch == oldest { 0 } else { activation(&stage) };
        held + reserved + taken <= *bound
    }

    /// The oldest weight half, unless it would hold up a pass that arrives meanwhile.
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
            let at = if to == rank { end } else { end + self.costs.send() };
            let index = self.index(next, microbatch);
            let times = if kind == PassKind::Forward { &mut self.input_at } else { &mut self.gradient_at };
            times[index] = at;
            // Whoever is at work until then looks anyway.
            if self.ranks[to].free_at < at {
                self.wakes.push(Reverse((at, to)));
            }
        }
    }

    fn index(&self, stage: usize, microbatch: usize) -> usize {
        stage * (self.num_microbatches + 1) + microbatch
    }
}
