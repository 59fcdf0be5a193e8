//! The losses of a step's microbatches, and their sum.

use crate::error::ParallelError;
use crate::ranks::RankGrid;
use crate::tree::TreeSum;
use crate::waiting::Waiting;
use std::sync::Arc;
use trireme_base::Rank;
use trireme_comm::{Buffer, Group, Work};
use trireme_model::Rehearsal;
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

/// Losses of all microbatches of a program, gathered from all ranks, so that those of a step are summed in the one order of the
/// microbatches: for each unit that adds to the loss by itself, then over the units.
pub(super) struct Losses {
    world: Arc<Group>,
    num_microbatches: usize,
    num_steps: usize,
    terms: Vec<Term>,
    /// Terms that units on this rank add.
    num_held: usize,
    /// Losses of this rank that this step has taken in.
    num_taken: usize,
    /// Present while nothing is under way. By rank, then term, then microbatch.
    buffer: Option<Buffer<f64>>,
    work: Option<Work<Buffer<f64>>>,
    sum: TreeSum<f64>,
    /// Mean losses by step.
    means: Vec<f64>,
}

/// What one unit adds to the loss.
struct Term {
    unit: usize,
    /// Rows of a step on all ranks.
    num_rows: f64,
    /// For each microbatch of all ranks, which of the gathered losses is its one: of a rank with the unit.
    order: Vec<usize>,
}

impl Losses {
    pub(super) fn new(
        outline: &Outline,
        ranks: &RankGrid,
        rehearsal: &Rehearsal,
    ) -> Result<Self, ParallelError> {
        let (world, num_microbatches) = (Arc::clone(ranks.world()), outline.num_microbatches);
        let data_degree = ranks.data().world_size();
        let (num_terms, num_all) = (rehearsal.losses().count(), data_degree * num_microbatches);
        let term = |(index, (unit, rows)): (usize, (usize, usize))| {
            let mut order = vec![0; num_all];
            for place in 0..num_all {
                let (rank, microbatch) = (Rank(place / num_microbatches), place % num_microbatches);
                let holder = outline.rank_of(unit) * data_degree + rank.0;
                order[global_microbatch(outline, ranks, rank, microbatch)] =
                    (holder * num_terms + index) * num_microbatches + microbatch;
            }
            let num_rows = (outline.microbatches_per_step() * data_degree * rows) as f64;
            Term { unit, num_rows, order }
        };
        let terms: Vec<Term> = rehearsal.losses().enumerate().map(term).collect();
        let num_held = terms.iter().filter(|term| outline.holds(term.unit)).count();
        let buffer = Some(world.buffer(world.world_size() * num_terms * num_microbatches)?);
        let num_steps = outline.num_steps();
        Ok(Losses {
            world,
            num_microbatches,
            num_steps,
            terms,
            num_held,
            num_taken: 0,
            buffer,
            work: None,
            sum: TreeSum::new(),
            means: Vec::with_capacity(num_steps),
        })
    }

    /// Takes in the loss of a unit for this rank's microbatch `microbatch`, a sum over its rows; the last one of the program sends
    /// them all.
    pub(super) fn push(&mut self, unit: usize, microbatch: usize, loss: f64) {
        let index = self.terms.iter().position(|term| term.unit == unit).expect("the rehearsal knew it");
        let buffer = self.buffer.as_mut().expect("losses are gathered once a program");
        let place = self.world.rank().0 * self.terms.len() + index;
        buffer[place * self.num_microbatches + microbatch] = loss;
        self.num_taken += 1;
        if self.num_taken == self.num_microbatches * self.num_held {
            self.send();
        }
    }

    fn send(&mut self) {
        self.num_taken = 0;
        self.work = self.buffer.take().map(|buffer| self.world.all_gather(buffer));
    }

    /// Waits for the losses of all ranks: the mean loss of each step.
    pub(super) fn wait(&mut self, waiting: &mut Waiting) -> Result<&[f64], ParallelError> {
        if self.work.is_none() {
            // A rank without a unit that adds to the loss has none of its own.
            self.send();
        }
        let losses = waiting.wait(self.work.take().expect("the losses were sent"))?;
        self.means.clear();
        self.means.resize(self.num_steps, 0.0);
        for Term { num_rows, order, .. } in &self.terms {
            for (mean, places) in self.means.iter_mut().zip(order.chunks_exact(order.len() / self.num_steps))
            {
                places.iter().for_each(|&place| self.sum.push(losses[place], |left, right| *left += right));
                let sum = self.sum.finish(|left, right| *left += right);
                *mean += sum.expect("a step has microbatches") / num_rows;
            }
        }
        self.buffer = Some(losses);
        Ok(&self.means)
    }
}
