//! What units report of a step's microbatches, and its means: the loss and metrics.

use crate::error::ParallelError;
use crate::ranks::RankGrid;
use crate::tree::TreeSum;
use crate::waiting::Waiting;
use std::sync::Arc;
use trireme_base::Rank;
use trireme_comm::{Buffer, Group, Work};
use trireme_model::{Rehearsal, Report};
use trireme_schedule::{Outline, ZeroStage};

/// The place among all microbatches of a step, or of all steps of a program, of microbatch `index` of the data-parallel `rank`.
pub(super) fn global_microbatch(outline: &Outline, ranks: &RankGrid, rank: Rank, index: usize) -> usize {
    let num_shards = ranks.shards().world_size();
    let num_microbatches = outline.microbatches_per_step();
    let (step, index) = (index / num_microbatches, index % num_microbatches);
    let within = match outline.zero_stage {
        ZeroStage::Zero | ZeroStage::One => rank.0 * num_microbatches + index,
        ZeroStage::Two | ZeroStage::Three => {
            let (replica, shard) = (rank.0 / num_shards, rank.0 % num_shards);
            (replica * num_microbatches + index) * num_shards + shard
        }
    };
    step * num_microbatches * ranks.data().world_size() + within
}

/// What units report of all microbatches of a program, gathered from all ranks, so that the reports of a step are summed in the
/// one order of the microbatches: those of each unit by themselves, then over the units.
pub(super) struct Means {
    world: Arc<Group>,
    num_microbatches: usize,
    num_steps: usize,
    terms: Vec<Term>,
    metric_names: Vec<&'static str>,
    /// Terms of units on this rank.
    num_held: usize,
    /// Reports of this rank that this step has taken in.
    num_taken: usize,
    /// Present while nothing is under way. By rank, then term, then microbatch.
    buffer: Option<Buffer<f64>>,
    work: Option<Work<Buffer<f64>>>,
    sum: TreeSum<f64>,
    /// Mean losses by step.
    losses: Vec<f64>,
    /// By step, then name.
    metrics: Vec<f64>,
}

/// What one unit adds to a mean.
struct Term {
    unit: usize,
    report: Report,
    /// Rows of a step on all ranks: of a metric those of all units that report it.
    num_rows: f64,
    /// For each microbatch of all ranks, which of the gathered reports is its one: of a rank with the unit.
    order: Vec<usize>,
}

impl Means {
    pub(super) fn new(
        outline: &Outline,
        ranks: &RankGrid,
        rehearsal: &Rehearsal,
    ) -> Result<Self, ParallelError> {
        let (world, num_microbatches) = (Arc::clone(ranks.world()), outline.num_microbatches);
        let data_degree = ranks.data().world_size();
        let (num_terms, num_all) = (rehearsal.reports().count(), data_degree * num_microbatches);
        let term = |(index, (unit, report)): (usize, (usize, Report))| {
            let mut order = vec![0; num_all];
            for place in 0..num_all {
                let (rank, microbatch) = (Rank(place / num_microbatches), place % num_microbatches);
                let holder = outline.rank_of(unit) * data_degree + rank.0;
                order[global_microbatch(outline, ranks, rank, microbatch)] =
                    (holder * num_terms + index) * num_microbatches + microbatch;
            }
            let rows = match report.metric {
                None => report.num_rows,
                name => {
                    let all = rehearsal.reports().filter(|(_, report)| report.metric == name);
                    all.map(|(_, report)| report.num_rows).sum()
                }
            };
            let num_rows = (outline.microbatches_per_step() * data_degree * rows) as f64;
            Term { unit, report, num_rows, order }
        };
        let terms: Vec<Term> = rehearsal.reports().enumerate().map(term).collect();
        let num_held = terms.iter().filter(|term| outline.holds(term.unit)).count();
        let buffer = Some(world.buffer(world.world_size() * num_terms * num_microbatches)?);
        let (num_steps, metric_names) = (outline.num_steps(), rehearsal.metric_names());
        Ok(Means {
            world,
            num_microbatches,
            num_steps,
            terms,
            num_held,
            num_taken: 0,
            buffer,
            work: None,
            sum: TreeSum::new(),
            losses: vec![0.0; num_steps],
            metrics: vec![0.0; num_steps * metric_names.len()],
            metric_names,
        })
    }

    /// Takes in what a unit reports of this rank's microbatch `microbatch`, a sum over rows: of the loss or of a metric. The last
    /// one of the program sends them all.
    pub(super) fn push(&mut self, unit: usize, metric: Option<&'static str>, microbatch: usize, sum: f64) {
        let is_own = |term: &Term| term.unit == unit && term.report.metric == metric;
        let index = self.terms.iter().position(is_own).expect("the rehearsal knew it");
        let buffer = self.buffer.as_mut().expect("reports are gathered once a program");
        let place = self.world.rank().0 * self.terms.len() + index;
        buffer[place * self.num_microbatches + microbatch] = sum;
        self.num_taken += 1;
        if self.num_taken == self.num_microbatches * self.num_held {
            self.send();
        }
    }

    fn send(&mut self) {
        self.num_taken = 0;
        self.work = self.buffer.take().map(|buffer| self.world.all_gather(buffer));
    }

    /// Waits for the reports of all ranks: the mean loss of each step. [Metrics](Means::metrics) are known then as well.
    pub(super) fn wait(&mut self, waiting: &mut Waiting) -> Result<&[f64], ParallelError> {
        if self.work.is_none() {
            // A rank without a unit that reports has nothing of its own.
            self.send();
        }
        let reports = waiting.wait(self.work.take().expect("the reports were sent"))?;
        self.losses.fill(0.0);
        self.metrics.fill(0.0);
        for Term { report, num_rows, order, .. } in &self.terms {
            let place = |name| self.metric_names.iter().position(|&own| own == name);
            let metric = report.metric.map(|name| place(name).expect("its name is known"));
            for (step, places) in order.chunks_exact(order.len() / self.num_steps).enumerate() {
                places.iter().for_each(|&place| self.sum.push(reports[place], |left, right| *left += right));
                let sum = self.sum.finish(|left, right| *left += right);
                let mean = match metric {
                    None => &mut self.losses[step],
                    Some(place) => &mut self.metrics[step * self.metric_names.len() + place],
                };
                *mean += sum.expect("a step has microbatches") / num_rows;
            }
        }
        self.buffer = Some(reports);
        Ok(&self.losses)
    }

    /// The metrics of a step of the last program, with their names.
    pub(super) fn metrics(&self, step: usize) -> impl Iterator<Item = (&'static str, f64)> {
        let num_names = self.metric_names.len();
        let values = &self.metrics[step * num_names..][..num_names];
        self.metric_names.iter().copied().zip(values.iter().copied())
    }
}
