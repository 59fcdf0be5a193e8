//! A step in time: the schedule of a run, with floating-point operations for time.

use super::Plan;
use anyhow::Result;
use std::ops::Range;
use trireme_schedule::Keep;
use trireme_schedule::pipeline::{Costs, Schedule, StageCosts, Timeline, draw_svg, draw_text, simulate};
use trireme_train::config::Config;
use trireme_train::pipeline_schedule;

/// Ticks of the longest stage's forward pass: finer than a picture shows.
const TICKS: u64 = 1000;

/// The stages of a run, and when their passes run.
pub(crate) struct Drawing {
    schedule: Schedule,
    timeline: Timeline,
    /// What each stage has of all floating-point operations.
    shares: Vec<(Range<usize>, f64)>,
}

impl Drawing {
    /// Of a plan; without a pipeline all units are one stage.
    pub(crate) fn new(config: &Config, plan: &Plan) -> Result<Self> {
        let whole = 0..plan.passes.len();
        let stages = match &plan.choices.stages[..] {
            [] => vec![whole],
            stages => stages.to_vec(),
        };
        let operations: Vec<[u64; 2]> = stages.iter().map(|units| operations(plan, units.clone())).collect();
        let longest = operations.iter().map(|[forward, _]| *forward).max().unwrap_or(0).max(1);
        // In ticks, rounded up: no pass takes no time.
        let ticks =
            |operations: u64| (u128::from(operations) * u128::from(TICKS) / u128::from(longest)) as u64;
        let cost = |[forward, backward]: &[u64; 2]| {
            let half = ticks(*backward / 2).max(1);
            StageCosts::of(ticks(*forward).max(1), half, half)
        };
        let costs = Costs::new(operations.iter().map(cost).collect(), 0)?;
        let schedule = pipeline_schedule(config, &costs)?;
        let timeline = simulate(&schedule, &costs)?;
        let all = operations.iter().flatten().sum::<u64>().max(1) as f64;
        let share = |[forward, backward]: &[u64; 2]| (forward + backward) as f64 / all;
        let shares = stages.into_iter().zip(operations.iter().map(share)).collect();
        Ok(Drawing { schedule, timeline, shares })
    }

    /// What the stages are and how much time is lost, in a line for each rank and one for all.
    pub(crate) fn summary(&self) -> String {
        let mut text = String::new();
        for rank in 0..self.schedule.num_ranks() {
            let stage = |stage: usize| {
                let (units, share) = &self.shares[stage];
                format!("units {}-{} ({:.1} % of the work)", units.start, units.end - 1, 100.0 * share)
            };
            let stages: Vec<String> = self.schedule.stages_of(rank).map(stage).collect();
            text += &format!("pipeline rank {rank}: {}\n", stages.join(", "));
        }
        let bubble = 100.0 * self.timeline.bubble().fraction();
        text + &format!(
            "bubble: {bubble:.1} % of what the busiest rank works, with floating-point operations for time\n"
        )
    }

    /// The grid of ranks and time, at most so many columns wide.
    pub(crate) fn text(&self, columns_max: usize) -> String {
        draw_text(&self.schedule, &self.timeline, columns_max)
    }

    /// The same as an SVG document.
    pub(crate) fn svg(&self, title: &str) -> String {
        draw_svg(&self.schedule, &self.timeline, title)
    }
}

/// Floating-point operations of forward and of backward, with what is made again for that.
fn operations(plan: &Plan, units: Range<usize>) -> [u64; 2] {
    units.fold([0, 0], |[forward, backward], unit| {
        let passes = &plan.passes[unit];
        let again = match plan.choices.keeps[unit] {
            Keep::All => 0,
            Keep::Products => passes.renewal_operations,
            Keep::Input | Keep::Nothing => passes.forward_operations,
        };
        [forward + passes.forward_operations, backward + passes.backward_operations + again]
    })
}
