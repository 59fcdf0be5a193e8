//! A step over time: the schedule of a run, with floating-point operations as time.

use super::plan::Plan;
use anyhow::Result;
use std::ops::Range;
use trireme_schedule::pipeline::{Schedule, Timeline, simulate};
use trireme_train::config::Config;
use trireme_train::{StageChoice, pipeline_costs, pipeline_schedule};

/// The stages of a run, and when their passes run.
pub(crate) struct PlannedSchedule {
    pub(crate) schedule: Schedule,
    pub(crate) timeline: Timeline,
    /// The units of each stage, and the stage's share of all floating-point operations.
    shares: Vec<(Range<usize>, f64)>,
}

impl PlannedSchedule {
    /// Simulates the schedule of a plan. Without a pipeline, all units are one stage.
    pub(crate) fn new(config: &Config, plan: &Plan) -> Result<Self> {
        let stages = plan.choices.stages_or_one(&plan.passes);
        let schedule = pipeline_schedule(config, &stages, plan.choices.schedule.as_ref())?;
        let timeline = simulate(&schedule, &pipeline_costs(&stages)?)?;
        let all: u64 = stages.iter().map(|stage| stage.costs.total()).sum();
        let share = |stage: StageChoice| (stage.units, stage.costs.total() as f64 / all as f64);
        Ok(PlannedSchedule { schedule, timeline, shares: stages.into_iter().map(share).collect() })
    }

    /// Describes the stages, in a line for each pipeline rank, then the bubble, the versions of weights and whether units may move.
    pub(crate) fn summary(&self, config: &Config) -> String {
        let mut text = String::new();
        for rank in 0..self.schedule.num_ranks() {
            let stage = |stage: usize| {
                let (units, share) = &self.shares[stage];
                format!("units {}-{} ({:.1} % of the work)", units.start, units.end - 1, 100.0 * share)
            };
            let stages: Vec<String> = self.schedule.stages_of(rank).map(stage).collect();
            text += &format!("pipeline rank {rank}: {}\n", stages.join(", "));
        }
        let bubble = 100.0 * self.timeline.bubble();
        text += &format!(
            "bubble: {bubble:.1} % of all ranks' time is idle, with floating-point operations as time\n"
        );
        if config.parallelism().is_asynchronous() {
            let list =
                |numbers: Vec<usize>| numbers.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
            let (versions, staleness) = (self.schedule.versions_kept(), self.schedule.staleness());
            text += &format!(
                "weights: stages keep {} versions, and gradients are applied to weights at most {} updates newer\n",
                list(versions),
                list(staleness)
            );
        }
        let parallelism = config.parallelism();
        let threshold = parallelism.pipeline_parallel_rebalance_threshold;
        match parallelism.pipeline_parallel_rebalance_interval {
            0 => text,
            interval => {
                text + &format!(
                    "every {interval} steps, units move if the busiest rank was measured to work more than \
                     {threshold} of the mean\n"
                )
            }
        }
    }
}
