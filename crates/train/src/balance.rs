//! Dynamic load balance of a pipeline. The times of units are measured, and if one rank works much more than the others, the units are
//! split into stages again.
//!
//! A unit is assumed to cost the same on every rank as on the rank that holds it. If ranks differ in speed, the next measurements show it.

use crate::all_gather_json::all_gather_json;
use crate::choices::StepChoices;
use crate::config::Config;
use crate::error::TrainError;
use crate::programs::proven_programs;
use crate::stages::{StageChoice, are_contiguous, counted_costs, stages_with_costs};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use trireme_base::{Rank, UnitPasses};
use trireme_parallel::{ActionTime, Executor};
use trireme_schedule::pipeline::{self, StageCosts};
use trireme_schedule::{Action, Program, ProgramHeader};

/// Steps whose times are kept: enough that a few slow steps do not change the median, few enough that the median reflects recent steps.
const STEPS_MAX: usize = 16;

/// Minimum relative reduction of the busiest rank's work that justifies moving units. Smaller gains may be noise.
const GAIN_MIN: f64 = 0.03;

/// The times of a unit in one step, in nanoseconds, summed over its microbatches, in this order: forward; backward passes that run both
/// halves; recomputation and the input half of backward; the weight half of backward; and the update.
type UnitTimes = [u64; 5];

/// Returns the index in [`UnitTimes`] to which the time of an action is added, or `None` if the action is no computation of a unit.
fn time_index(action: Action) -> Option<usize> {
    match action {
        Action::Forward { .. } => Some(0),
        Action::Backward { .. } => Some(1),
        Action::Recompute { .. } | Action::BackwardInput { .. } => Some(2),
        Action::BackwardWeight { .. } => Some(3),
        Action::Step { .. } => Some(4),
        _ => None,
    }
}

/// The times of this rank's units in the last steps.
struct MeasuredTimes {
    num_units: usize,
    /// Indexed by the number of the kept step modulo `STEPS_MAX`, then by unit.
    times: Vec<UnitTimes>,
    /// Number of steps observed. The first one is not kept, because it allocates memory that later steps reuse.
    num_seen: usize,
}

impl MeasuredTimes {
    fn new(num_units: usize) -> Self {
        MeasuredTimes { num_units, times: vec![UnitTimes::default(); STEPS_MAX * num_units], num_seen: 0 }
    }

    /// Records the unit times of one step. Does not allocate.
    fn observe(&mut self, program: &Program, timeline: &[ActionTime]) {
        self.num_seen += 1;
        let Some(offset) = self.num_seen.checked_sub(2).map(|kept| kept % STEPS_MAX * self.num_units) else {
            return;
        };
        let step = &mut self.times[offset..offset + self.num_units];
        step.fill(UnitTimes::default());
        for (action, time) in program.actions.iter().zip(timeline) {
            if let Some(part) = time_index(*action) {
                step[action.unit()][part] += (time.end - time.start).as_nanos() as u64;
            }
        }
    }

    /// Returns the median of each time of each unit over the recorded steps, or `None` if no step has been recorded.
    fn medians(&self) -> Option<Vec<UnitTimes>> {
        let num_kept = self.num_seen.saturating_sub(1).min(STEPS_MAX);
        let median = |unit: usize, part: usize| {
            let mut found: Vec<u64> =
                (0..num_kept).map(|step| self.times[step * self.num_units + unit][part]).collect();
            found.sort_unstable();
            found[num_kept / 2]
        };
        let of_unit = |unit| std::array::from_fn(|part| median(unit, part));
        (num_kept > 0).then(|| (0..self.num_units).map(of_unit).collect())
    }
}

/// Returns the costs of units in measured nanoseconds: of passes per microbatch, and of the update per step. A backward pass that ran both
/// halves is divided in proportion to the counted costs of the halves.
fn measured_costs(counted: &[StageCosts], times: &[UnitTimes], num_microbatches: usize) -> Vec<StageCosts> {
    let costs = |(counted, times): (&StageCosts, &UnitTimes)| {
        let [forward, backward, recompute_and_input, weight, update] = *times;
        let halves = u128::from(counted.backward_input + counted.backward_weight).max(1);
        let of_weights = (u128::from(backward) * u128::from(counted.backward_weight) / halves) as u64;
        let per_microbatch = |time: u64| time / num_microbatches as u64;
        StageCosts {
            forward: per_microbatch(forward),
            backward_input: per_microbatch(recompute_and_input + backward - of_weights),
            backward_weight: per_microbatch(weight + of_weights),
            update,
            ..*counted
        }
    };
    counted.iter().zip(times).map(costs).collect()
}

/// Returns the work of the busiest rank relative to the mean over ranks.
fn imbalance<'a>(units: impl Iterator<Item = &'a Range<usize>>, stage_ranks: &[usize], work: &[u64]) -> f64 {
    let mut ranks = vec![0; stage_ranks.iter().max().map_or(0, |last| last + 1)];
    for (units, &rank) in units.zip(stage_ranks) {
        ranks[rank] += work[units.clone()].iter().sum::<u64>();
    }
    let busiest = ranks.iter().copied().max().unwrap_or(0) as f64;
    busiest * ranks.len() as f64 / (ranks.iter().sum::<u64>() as f64).max(1.0)
}

/// A new split of the units into stages, with the [`imbalance`] before and after it, computed from the same times.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct NewSplit {
    stages: Vec<StageChoice>,
    before: f64,
    after: f64,
}

/// Returns a split that is better than `current`, or `None` if there is none, or if the imbalance is at most `threshold`.
fn new_split(
    current: &[StageChoice],
    stage_ranks: &[usize],
    costs: &[StageCosts],
    num_microbatches: usize,
    threshold: f64,
) -> Option<NewSplit> {
    let in_step = |costs: &StageCosts| costs.total() * num_microbatches as u64 + costs.update;
    let work: Vec<u64> = costs.iter().map(in_step).collect();
    let before = imbalance(current.iter().map(|stage| &stage.units), stage_ranks, &work);
    if before <= threshold {
        return None;
    }
    let units = pipeline::partition_units(&work, current.len());
    let after = imbalance(units.iter(), stage_ranks, &work);
    let is_better = after < before * (1.0 - GAIN_MIN);
    is_better.then(|| NewSplit { stages: stages_with_costs(costs, units), before, after })
}

/// The choices with the new stages, and the reason for moving units, as it is printed.
pub(crate) struct Rebalancing {
    pub(crate) choices: StepChoices,
    pub(crate) reason: String,
}

pub(crate) struct Rebalancer {
    interval: u64,
    threshold: f64,
    passes: Vec<UnitPasses>,
    times: MeasuredTimes,
}

impl Rebalancer {
    /// Returns `None` if the config turns rebalancing off.
    pub(crate) fn new(config: &Config, passes: Vec<UnitPasses>) -> Option<Self> {
        let parallelism = config.parallelism();
        let interval = parallelism.pipeline_parallel_rebalance_interval;
        let threshold = parallelism.pipeline_parallel_rebalance_threshold;
        let times = MeasuredTimes::new(passes.len());
        (interval > 0).then_some(Rebalancer { interval, threshold, passes, times })
    }

    pub(crate) fn observe(&mut self, executor: &Executor) {
        self.times.observe(executor.program(), executor.timeline());
    }

    /// Discards all measurements, because units have moved.
    pub(crate) fn clear_measurements(&mut self) {
        self.times.num_seen = 0;
    }

    /// Returns the new stages if units should move after `step`. Rank 0 decides for all ranks from the measurements of all. Collective:
    /// each rank sends five numbers per unit, and rank 0 sends its decision.
    pub(crate) fn decide(
        &self,
        step: u64,
        config: &Config,
        choices: &StepChoices,
        executor: &Executor,
    ) -> Result<Option<Rebalancing>, TrainError> {
        let own = self.times.medians().filter(|_| step.is_multiple_of(self.interval));
        let Some(own) = own else { return Ok(None) };
        let group = executor.group();
        let gathered = all_gather_json(group, &own)?;
        let found = match group.rank() {
            Rank::ROOT => self.find_better_split(&gathered, config, choices, executor),
            _ => None,
        };
        let Some(new_split) = all_gather_json(group, &found)?.swap_remove(Rank::ROOT.0) else {
            return Ok(None);
        };
        if !are_contiguous(&new_split.stages) {
            return Err(TrainError::UnreadableStages);
        }
        Ok(Some(Rebalancing::new(step, new_split, choices)))
    }

    /// Returns a better split that the schedule can run, computed from the unit times of all ranks.
    fn find_better_split(
        &self,
        gathered: &[Vec<UnitTimes>],
        config: &Config,
        choices: &StepChoices,
        executor: &Executor,
    ) -> Option<NewSplit> {
        let times = slowest(gathered, self.passes.len());
        let header: &ProgramHeader = &executor.program().header;
        let counted = counted_costs(&self.passes, &choices.keeps);
        let costs = measured_costs(&counted, &times, header.num_microbatches);
        let stage_ranks: Vec<usize> = header.stages.iter().map(|stage| stage.rank).collect();
        let new_split =
            new_split(&choices.stages, &stage_ranks, &costs, header.num_microbatches, self.threshold)?;
        let choices = StepChoices { stages: new_split.stages.clone(), ..choices.clone() };
        proven_programs(config, &header.chain, &choices).is_ok().then_some(new_split)
    }
}

/// Returns, for each unit, its longest times over all ranks. A step waits for the slowest of the ranks that run a unit.
fn slowest(gathered: &[Vec<UnitTimes>], num_units: usize) -> Vec<UnitTimes> {
    let mut times = vec![UnitTimes::default(); num_units];
    for gathered in gathered {
        for (slowest, &time) in times.iter_mut().flatten().zip(gathered.iter().flatten()) {
            *slowest = time.max(*slowest);
        }
    }
    times
}

impl Rebalancing {
    fn new(step: u64, new_split: NewSplit, current: &StepChoices) -> Self {
        let NewSplit { stages, before, after } = new_split;
        let reason = format!(
            "step {step}: the busiest worker of the pipeline took {before:.2} times the mean; units {} become {}, for \
             {after:.2} times the mean",
            split_text(&current.stages),
            split_text(&stages)
        );
        Rebalancing { choices: StepChoices { stages, ..current.clone() }, reason }
    }
}

/// Formats the units of stages, such as `0-3 | 4-7`.
fn split_text(stages: &[StageChoice]) -> String {
    let text = |StageChoice { units, .. }: &StageChoice| match units.len() {
        1 => units.start.to_string(),
        _ => format!("{}-{}", units.start, units.end - 1),
    };
    stages.iter().map(text).collect::<Vec<_>>().join(" | ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};
    use trireme_schedule::{Keep, UnitChain, single};

    fn units(cuts: &[Range<usize>]) -> Vec<StageChoice> {
        let choice =
            |units: &Range<usize>| StageChoice { units: units.clone(), costs: StageCosts::of(1, 1, 1) };
        cuts.iter().map(choice).collect()
    }

    fn costs_of(times: &[u64]) -> Vec<StageCosts> {
        times.iter().map(|&time| StageCosts::of(time, time, 0)).collect()
    }

    #[test]
    fn an_uneven_split_is_improved() {
        let costs = costs_of(&[100, 100, 100, 500]);
        let found = new_split(&units(&[0..1, 1..4]), &[0, 1], &costs, 4, 1.1).unwrap();
        assert_eq!(found.stages.iter().map(|stage| stage.units.clone()).collect::<Vec<_>>(), [0..3, 3..4]);
        assert_eq!((found.before, found.after), (1.75, 1.25));
        // The schedule uses costs relative to the longest stage's forward pass.
        assert_eq!((found.stages[0].costs.forward, found.stages[1].costs.forward), (600, 1000));
        // The update makes the first unit the most expensive one, whatever its passes cost.
        let costs = [StageCosts { update: 9000, ..StageCosts::of(1, 1, 0) }, costs[0], costs[0], costs[0]];
        let found = new_split(&units(&[0..2, 2..4]), &[0, 1], &costs, 4, 1.1).unwrap();
        assert_eq!(found.stages[0].units, 0..1);
    }

    #[test]
    fn even_splits_and_best_splits_are_kept() {
        assert_eq!(new_split(&units(&[0..2, 2..4]), &[0, 1], &costs_of(&[100, 120, 100, 100]), 4, 1.1), None);
        // One unit has more than half of the work.
        assert_eq!(new_split(&units(&[0..3, 3..4]), &[0, 1], &costs_of(&[10, 10, 10, 100]), 4, 1.1), None);
        // The work of all stages of a rank adds up.
        let round = [0, 1, 0, 1];
        assert_eq!(
            new_split(&units(&[0..1, 1..2, 2..3, 3..4]), &round, &costs_of(&[100, 300, 300, 100]), 4, 1.1),
            None
        );
    }

    #[test]
    fn times_are_medians_of_the_last_steps_without_waits() {
        let program = single::program(&UnitChain::of_units(2), 2);
        let mut times = MeasuredTimes::new(2);
        let now = Instant::now();
        let step = |nanos: u64| -> Vec<ActionTime> {
            let time = |index: usize| {
                let start = now + Duration::from_micros(1000 * index as u64 + 500);
                ActionTime {
                    issued: now,
                    start,
                    end: start + Duration::from_nanos(nanos),
                    product_operations: 0,
                }
            };
            (0..program.actions.len()).map(time).collect()
        };
        assert!(times.medians().is_none());
        times.observe(&program, &step(70_000));
        assert!(times.medians().is_none(), "the first step is not like the others");
        for nanos in [10, 90_000, 30] {
            times.observe(&program, &step(nanos));
        }
        assert_eq!(times.medians().unwrap(), [[60, 60, 0, 0, 30]; 2]);
        (0..STEPS_MAX).for_each(|_| times.observe(&program, &step(7)));
        assert_eq!(times.medians().unwrap(), [[14, 14, 0, 0, 7]; 2]);
    }

    #[test]
    fn full_backward_is_divided_by_counted_operations() {
        let counted = [StageCosts::of(5, 30, 10)];
        let costs = measured_costs(&counted, &[[40, 80, 8, 4, 9]], 4);
        let expected = StageCosts { update: 9, ..StageCosts::of(10, 17, 6) };
        assert_eq!(costs, [expected]);
        assert_eq!(measured_costs(&[StageCosts::of(0, 0, 0)], &[[4; 5]], 2)[0].backward_input, 4);
    }

    #[test]
    fn units_move_by_the_times_of_the_slowest_ranks() {
        let gathered = [vec![[1, 2, 3, 4, 5]], vec![[2, 1, 0, 9, 0], [7; 5]]];
        assert_eq!(slowest(&gathered, 2), [[2, 2, 3, 9, 5], [7; 5]]);
        let keeps = vec![Keep::All, Keep::Input];
        let state = trireme_schedule::StateLayout::UNSHARDED;
        let schedule = "ranks 1 placement 0 microbatches 1\nrank 0: F 0 0, B 0 0".parse().ok();
        let current = StepChoices { keeps, state, stages: units(&[0..1, 1..4]), schedule };
        let next = StepChoices { stages: units(&[0..3, 3..4]), ..current.clone() };
        let new_split = NewSplit { stages: next.stages.clone(), before: 1.75, after: 1.25 };
        let text = serde_json::to_string(&new_split).unwrap();
        assert_eq!(serde_json::from_str::<NewSplit>(&text).unwrap(), new_split);
        let made = Rebalancing::new(40, new_split, &current);
        assert_eq!(made.choices, next);
        assert!(made.choices.schedule.is_some());
        let text = "step 40: the busiest worker of the pipeline took 1.75 times the mean; units 0 | 1-3 become 0-2 | 3, for 1.25 times the mean";
        assert_eq!(made.reason, text);
        assert!(serde_json::from_str::<NewSplit>("{\"stages\": [], \"before\": 1.75}").is_err());
        let cuts: [&[Range<usize>]; 4] = [&[0..3, 3..4], &[1..2, 2..4], &[0..1, 2..4], &[0..4, 4..4]];
        assert_eq!(cuts.map(|cut| are_contiguous(&units(cut))), [true, false, false, false]);
    }
}
