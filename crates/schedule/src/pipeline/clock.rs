//! The pipeline clock: when each pass begins and ends.
//!
//! It exists in addition to the discrete-event [engine](crate::engine) because the search for a schedule times millions of passes, and
//! undoes the moves that do not help. There are no loads and streams here: a pass begins at the end of the longest chain of passes and
//! messages that must precede it. After a move, only the times from the first moved pass on are recomputed. Tests of the planner compare
//! the clock with the engine.

use super::costs::Costs;
use super::error::{PassIndex, ScheduleError, Wait, WaitChain};
use super::pass::{Pass, PassKind};
use super::range_checks;
use super::schedule::Schedule;
use super::timeline::{PassInterval, Timeline};
use std::collections::VecDeque;

/// Runs a schedule in simulated time. A rank begins a pass when it has finished its previous pass and the needed results are available. A
/// result is available on its own rank when its pass ends, and on another rank [`Costs::send_ticks`] later. Messages occupy neither sender
/// nor receiver.
///
/// Cost: linear in the number of passes.
///
/// # Errors
/// If sizes, placement, passes or costs do not fit each other, or the schedule deadlocks.
pub fn simulate(schedule: &Schedule, costs: &Costs) -> Result<Timeline, ScheduleError> {
    range_checks::check(schedule, costs)?;
    let (timeline, stuck) = run(schedule, costs);
    stuck.map_or(Ok(timeline), |chain| Err(ScheduleError::Deadlock(chain)))
}

/// Runs a schedule as far as possible. Returns its timeline, and the ranks that wait for each other if the schedule does not reach its end.
/// The sizes must have been checked.
pub(super) fn run(schedule: &Schedule, costs: &Costs) -> (Timeline, Option<WaitChain>) {
    let mut clock = Clock::new(schedule, costs);
    clock.run(schedule);
    let stuck = clock.wait_chain(schedule);
    (Timeline::new(schedule, costs, clock.intervals), stuck)
}

/// The time of a pass that has not run.
const NEVER: u64 = u64::MAX;

/// The progress of all ranks. The schedule is passed to each call, so that passes that have not run may change between calls.
pub(super) struct Clock<'a> {
    costs: &'a Costs,
    num_microbatches: usize,
    /// End of forward, by stage and microbatch.
    forward_end: Vec<u64>,
    /// Time at which the gradient of a stage's input is available, by stage and microbatch.
    gradient_end: Vec<u64>,
    /// End of an update of a stage, by stage and the last microbatch of the update.
    update_end: Vec<u64>,
    /// Spans of the passes that each rank has run.
    pub(super) intervals: Vec<Vec<PassInterval>>,
    /// Ranks that may be able to continue.
    awake: VecDeque<usize>,
    is_awake: Vec<bool>,
}

impl<'a> Clock<'a> {
    pub(super) fn new(schedule: &Schedule, costs: &'a Costs) -> Self {
        let num_microbatches = schedule.total_microbatches();
        let never = vec![NEVER; schedule.num_stages() * num_microbatches];
        Clock {
            costs,
            num_microbatches,
            forward_end: never.clone(),
            gradient_end: never.clone(),
            update_end: never,
            intervals: schedule.ranks.iter().map(|passes| Vec::with_capacity(passes.len())).collect(),
            awake: VecDeque::with_capacity(schedule.num_ranks()),
            is_awake: vec![false; schedule.num_ranks()],
        }
    }

    /// Runs all ranks as far as possible.
    pub(super) fn run(&mut self, schedule: &Schedule) {
        (0..schedule.num_ranks()).for_each(|rank| self.wake(rank));
        while let Some(rank) = self.awake.pop_front() {
            self.is_awake[rank] = false;
            self.advance(schedule, rank);
        }
    }

    /// Undoes all but the first `num_kept` passes of each rank.
    pub(super) fn rewind(&mut self, schedule: &Schedule, num_kept: &[usize]) {
        for (rank, &num_kept) in num_kept.iter().enumerate() {
            for &pass in &schedule.ranks[rank][num_kept..self.intervals[rank].len()] {
                self.note_end(pass, NEVER);
            }
            self.intervals[rank].truncate(num_kept);
        }
    }

    /// Adds the passes that this clock has not run, with the times in `spans`, which an earlier run of the same schedule recorded.
    pub(super) fn replay(&mut self, schedule: &Schedule, spans: &[Vec<PassInterval>]) {
        for (rank, spans) in spans.iter().enumerate() {
            let num_done = self.intervals[rank].len();
            for (&pass, span) in schedule.ranks[rank][num_done..].iter().zip(&spans[num_done..]) {
                self.note_end(pass, span.end);
            }
            self.intervals[rank].extend_from_slice(&spans[num_done..]);
        }
    }

    fn next_of(&self, schedule: &Schedule, rank: usize) -> Option<Pass> {
        schedule.ranks[rank].get(self.intervals[rank].len()).copied()
    }

    fn advance(&mut self, schedule: &Schedule, rank: usize) {
        let mut free = self.intervals[rank].last().map_or(0, |span| span.end);
        while let Some(pass) = self.next_of(schedule, rank) {
            let Ok(ready) = self.ready(schedule, pass) else { return };
            let start = free.max(ready);
            let end = start + self.costs.ticks(pass);
            self.intervals[rank].push(PassInterval { start, end });
            self.note_end(pass, end);
            free = end;
            if let Some(stage) = pass.result_goes_to(schedule.num_stages()) {
                self.wake(schedule.stage_ranks[stage]);
            }
            if pass.kind == PassKind::Update {
                // All ranks may wait for the gradient norm of the step.
                (0..schedule.num_ranks()).filter(|&other| other != rank).for_each(|rank| self.wake(rank));
            }
        }
    }

    fn note_end(&mut self, pass: Pass, end: u64) {
        let index = pass.stage * self.num_microbatches + pass.microbatch;
        match pass.kind {
            PassKind::Forward => self.forward_end[index] = end,
            PassKind::Backward | PassKind::BackwardInput => self.gradient_end[index] = end,
            PassKind::Update => self.update_end[index] = end,
            PassKind::BackwardWeight => {}
        }
    }

    fn wake(&mut self, rank: usize) {
        if !std::mem::replace(&mut self.is_awake[rank], true) {
            self.awake.push_back(rank);
        }
    }

    /// Returns when all results that a pass needs are available, or a needed pass that has not run.
    fn ready(&self, schedule: &Schedule, pass: Pass) -> Result<u64, Pass> {
        let mut ready = 0;
        for needed in needs(pass, schedule.num_stages()).into_iter().flatten() {
            let ends = if needed.kind == PassKind::Forward { &self.forward_end } else { &self.gradient_end };
            let end = ends[needed.stage * self.num_microbatches + needed.microbatch];
            if end == NEVER {
                return Err(needed);
            }
            let ranks = &schedule.stage_ranks;
            let is_same_rank = ranks[needed.stage] == ranks[pass.stage];
            ready = ready.max(if is_same_rank { end } else { end + self.costs.send_ticks() });
        }
        if pass.kind == PassKind::Update {
            ready = ready.max(self.norm_ready(schedule, pass)?);
        }
        Ok(ready)
    }

    /// Returns when the gradient norm by which an update may clip is known: when all stages have run their updates of the step that the
    /// norm belongs to ([`Schedule::norm_lag`]).
    fn norm_ready(&self, schedule: &Schedule, update: Pass) -> Result<u64, Pass> {
        let microbatches = schedule.num_microbatches;
        let lag = Schedule::norm_lag(schedule.num_ranks(), microbatches);
        let Some(microbatch) = update.microbatch.checked_sub(lag * microbatches) else { return Ok(0) };
        (0..schedule.num_stages()).try_fold(0, |ready, stage| {
            match self.update_end[stage * self.num_microbatches + microbatch] {
                NEVER => Err(Pass::update(stage, microbatch)),
                end => Ok(ready.max(end)),
            }
        })
    }

    /// Returns the pass at which a rank waits and the pass that it waits for. `None` if the rank does not wait.
    fn wait(&self, schedule: &Schedule, rank: usize) -> Option<Wait> {
        let pass = self.next_of(schedule, rank)?;
        let needs = self.ready(schedule, pass).err()?;
        let place = PassIndex { rank, index: self.intervals[rank].len() };
        Some(Wait { place, pass, needs, for_rank: schedule.stage_ranks[needs.stage] })
    }

    /// Returns a chain of waiting ranks, or `None` if no rank waits. Follows the waits from the first waiting rank until a rank repeats or
    /// does not wait. If a rank repeats, the chain is the cycle alone.
    fn wait_chain(&self, schedule: &Schedule) -> Option<WaitChain> {
        let mut next = (0..schedule.num_ranks()).find_map(|rank| self.wait(schedule, rank));
        next.as_ref()?;
        let mut waits: Vec<Wait> = Vec::new();
        while let Some(wait) = next {
            if let Some(first) = waits.iter().position(|known| known.place.rank == wait.place.rank) {
                waits.drain(..first);
                break;
            }
            waits.push(wait);
            next = self.wait(schedule, wait.for_rank);
        }
        Some(WaitChain(waits))
    }
}

/// Returns the passes whose results a pass needs: forward of the previous stage, backward of the next stage, its own forward, input half or
/// backward.
pub(super) fn needs(pass: Pass, num_stages: usize) -> [Option<Pass>; 2] {
    let Pass { kind, stage, microbatch } = pass;
    match kind {
        PassKind::Forward => [stage.checked_sub(1).map(|before| Pass::forward(before, microbatch)), None],
        PassKind::Backward | PassKind::BackwardInput => {
            let is_last = stage + 1 == num_stages;
            let gradient =
                (!is_last).then(|| Pass { kind: PassKind::Backward, stage: stage + 1, microbatch });
            [Some(Pass::forward(stage, microbatch)), gradient]
        }
        PassKind::BackwardWeight => [Some(Pass::backward_input(stage, microbatch)), None],
        PassKind::Update => [Some(Pass::backward(stage, microbatch)), None],
    }
}
