//! A step as measured, and as simulated with messages that take no time.

use super::breakdown::Breakdown;
use super::picture::StepPicture;
use anyhow::{Context, Result};
use std::collections::HashMap;
use std::mem::{Discriminant, discriminant};
use trireme_planner::{StepTimeline, simulate};
use trireme_schedule::pipeline::PassInterval;
use trireme_schedule::{Action, Program, Stream};
use trireme_train::trace::{RankTimeline, TracedStep};

/// A step, measured and simulated. Times are in nanoseconds.
pub(super) struct Comparison {
    pub(super) step: u64,
    /// Number of ranks that run the same units. Only the first pipeline is drawn.
    pub(super) data_degree: usize,
    /// Time from the beginning to the end of all ranks.
    pub(super) measured_time: u64,
    pub(super) simulated_time: u64,
    pub(super) measured: StepPicture,
    pub(super) simulated: StepPicture,
    /// Time fractions of the drawn ranks.
    pub(super) time_fractions: Vec<TimeFractions>,
    /// Breakdown over all ranks.
    pub(super) breakdown: Breakdown,
}

impl Comparison {
    /// Simulates the programs of a step. Each action takes the mean time of its kind.
    pub(super) fn new(step: &TracedStep) -> Result<Self> {
        let drawn: Vec<&RankTimeline> = step.ranks.iter().filter(|rank| rank.place.data_rank == 0).collect();
        let programs: Vec<Program> = drawn.iter().map(|rank| rank.program()).collect();
        let costs = ActionTimes::of(step);
        let simulated = simulate(&programs, |rank, action| costs.mean(rank, action)).with_context(|| {
            format!("the trace of step {} does not describe an executable program", step.step)
        })?;
        let spans = |rank: &&RankTimeline| {
            rank.actions.iter().map(|traced| PassInterval { start: traced.start, end: traced.end }).collect()
        };
        let measured_time = step.makespan();
        let measured = StepTimeline { ranks: drawn.iter().map(spans).collect(), makespan: measured_time };
        Ok(Comparison {
            step: step.step,
            data_degree: step.ranks.len() / drawn.len(),
            measured_time,
            simulated_time: simulated.makespan,
            measured: StepPicture::new(&programs, &measured),
            simulated: StepPicture::new(&programs, &simulated),
            time_fractions: drawn.iter().map(|rank| TimeFractions::of(rank, measured_time)).collect(),
            breakdown: Breakdown::of(step),
        })
    }

    /// Returns the measured time divided by the simulated time.
    pub(super) fn ratio(&self) -> f64 {
        self.measured_time as f64 / self.simulated_time.max(1) as f64
    }
}

/// The kind of an action, whatever its microbatch: pipeline rank, action and unit.
type ActionKind = (usize, Discriminant<Action>, usize);

/// Sum of the nanoseconds, and number of actions, of each kind.
struct ActionTimes(HashMap<ActionKind, (u64, u64)>);

impl ActionTimes {
    fn of(step: &TracedStep) -> ActionTimes {
        let mut costs: HashMap<ActionKind, (u64, u64)> = HashMap::new();
        for rank in &step.ranks {
            for traced in &rank.actions {
                let (sum, number) = costs.entry(kind(rank.place.pipeline_rank, traced.action)).or_default();
                *sum += traced.end - traced.start;
                *number += 1;
            }
        }
        ActionTimes(costs)
    }

    /// Returns the mean time of an action's kind. Messages take no time: the comparison shows their cost.
    fn mean(&self, rank: usize, action: Action) -> u64 {
        match self.0.get(&kind(rank, action)) {
            Some((sum, number)) if action.stream() != Stream::Pipeline => sum / number,
            _ => 0,
        }
    }
}

fn kind(rank: usize, action: Action) -> ActionKind {
    (rank, discriminant(&action), action.unit())
}

/// Fractions of a step's time that a rank spent on each kind of work.
pub(super) struct TimeFractions {
    pub(super) passes: f64,
    /// Waiting for activations and gradients, and accepting those that have arrived.
    pub(super) waiting: f64,
    /// Issuing sends and receives.
    pub(super) sending: f64,
    /// Waiting until all reductions have ended.
    pub(super) reducing: f64,
    pub(super) updates: f64,
}

impl TimeFractions {
    fn of(rank: &RankTimeline, makespan: u64) -> TimeFractions {
        let [mut passes, mut waiting, mut sending, mut reducing, mut updates] = [0; 5];
        for traced in &rank.actions {
            let (waited, worked) = (traced.start - traced.issued, traced.end - traced.start);
            match traced.action {
                Action::Step { .. } => {
                    reducing += waited;
                    updates += worked;
                }
                action if action.is_pass() => {
                    waiting += waited;
                    passes += worked;
                }
                action if action.stream() == Stream::Pipeline => sending += waited + worked,
                _ => (),
            }
        }
        let [passes, waiting, sending, reducing, updates] = [passes, waiting, sending, reducing, updates]
            .map(|time: u64| time as f64 / makespan.max(1) as f64);
        TimeFractions { passes, waiting, sending, reducing, updates }
    }

    pub(super) fn other(&self) -> f64 {
        let TimeFractions { passes, waiting, sending, reducing, updates } = self;
        1.0 - passes - waiting - sending - reducing - updates
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use trireme_train::trace::{RankPlace, TracedAction};

    /// Creates a rank whose actions each wait and then work for the given times.
    fn rank(pipeline_rank: usize, text: &str, times: &[(u64, u64)]) -> RankTimeline {
        let program: Program = text.parse().unwrap();
        let mut now = 0;
        let mut act = |(&action, &(waited, worked)): (&Action, &(u64, u64))| {
            let issued = now;
            now += waited + worked;
            TracedAction { action, issued, start: issued + waited, end: now, product_flops: 0, kernels: None }
        };
        let actions = program.actions.iter().zip(times).map(&mut act).collect();
        let place = RankPlace { rank: pipeline_rank, pipeline_rank, data_rank: 0, host: 0 };
        RankTimeline { place, header: program.header, peak_flops: None, duration: now, actions }
    }

    #[test]
    fn a_step_is_simulated_with_the_means_of_its_passes_and_no_messages() {
        let ranks = vec![
            rank(
                0,
                "units 2 microbatches 2 rank 0 stage 0-1@0 stage 1-2@1\nF 0 0\nSEND_F 0 0\nF 0 1\nSEND_F 0 1\nRECV_B 1 0\nB 0 0\n\
                 RECV_B 1 1\nB 0 1\nREDUCE_GRAD 0\nSTEP 0",
                &[(0, 8), (0, 5), (0, 12), (0, 5), (0, 0), (40, 20), (0, 0), (10, 20), (0, 0), (0, 10)],
            ),
            rank(
                1,
                "units 2 microbatches 2 rank 1 stage 0-1@0 stage 1-2@1\nRECV_F 0 0\nF 1 0\nRECV_F 0 1\nB 1 0\nSEND_B 1 0\nF 1 1\n\
                 B 1 1\nREDUCE_GRAD 1\nSEND_B 1 1\nSTEP 1",
                &[(0, 0), (20, 10), (0, 0), (0, 20), (0, 5), (0, 10), (0, 20), (0, 0), (0, 5), (30, 10)],
            ),
        ];
        let comparison = Comparison::new(&TracedStep { step: 7, began: 0, model_flops: 0.0, ranks }).unwrap();
        // F 10, F 10, B 20, F 10, B 20, B 20, and updates.
        assert_eq!((comparison.measured_time, comparison.simulated_time), (130, 100));
        assert_eq!(comparison.ratio(), 1.3);
        // Each of the two ranks works 60 of 90.
        assert_eq!(comparison.simulated.bubble, 1.0 - 120.0 / 180.0);
        let shares = &comparison.time_fractions[0];
        let found = [shares.passes, shares.waiting, shares.sending, shares.reducing, shares.updates];
        assert_eq!(found, [60, 50, 10, 0, 10].map(|time| f64::from(time) / 130.0));
        assert!(shares.other().abs() < 1e-9);
        assert_eq!(comparison.time_fractions[1].reducing, 30.0 / 130.0);
    }
}
