//! The losses of a step's microbatches, and their sum.

use crate::error::ParallelError;
use crate::ranks::RankGrid;
use crate::tree::TreeSum;
use crate::waiting::Waiting;
use std::sync::Arc;
use trireme_base::Rank;
use trireme_comm::{Buffer, Group, Work};
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
/// microbatches.
pub(super) struct Losses {
    world: Arc<Group>,
    num_microbatches: usize,
    num_steps: usize,
    /// For each microbatch of all ranks, which of the gathered losses is its one: of a rank with the head.
    order: Vec<usize>,
    /// Losses of this rank that this step has taken in.
    num_taken: usize,
    /// Present while nothing is under way.
    buffer: Option<Buffer<f64>>,
    work: Option<Work<Buffer<f64>>>,
    sum: TreeSum<f64>,
    /// By step.
    sums: Vec<f64>,
}

impl Losses {
    pub(super) fn new(outline: &Outline, ranks: &RankGrid) -> Result<Self, ParallelError> {
        let (world, num_microbatches) = (Arc::clone(ranks.world()), outline.num_microbatches);
        let data_degree = ranks.data().world_size();
        let first = outline.rank_of(outline.num_units - 1) * data_degree * num_microbatches;
        let mut order = vec![0; data_degree * num_microbatches];
        for place in 0..order.len() {
            let (rank, index) = (Rank(place / num_microbatches), place % num_microbatches);
            order[global_microbatch(outline, ranks, rank, index)] = first + place;
        }
        let buffer = Some(world.buffer(world.world_size() * num_microbatches)?);
        let num_steps = outline.num_steps();
        let (sum, sums) = (TreeSum::new(), Vec::with_capacity(num_steps));
        Ok(Losses { world, num_microbatches, num_steps, order, num_taken: 0, buffer, work: None, sum, sums })
    }

    /// Takes in the loss of this rank's microbatch `index`; the last one of the program sends them all.
    pub(super) fn push(&mut self, index: usize, loss: f64) {
        let buffer = self.buffer.as_mut().expect("losses are gathered once a program");
        buffer[self.world.rank().0 * self.num_microbatches + index] = loss;
        self.num_taken += 1;
        if self.num_taken == self.num_microbatches {
            self.send();
        }
    }

    fn send(&mut self) {
        self.num_taken = 0;
        self.work = self.buffer.take().map(|buffer| self.world.all_gather(buffer));
    }

    /// Waits for the losses of all ranks: their sum in each step.
    pub(super) fn wait(&mut self, waiting: &mut Waiting) -> Result<&[f64], ParallelError> {
        if self.work.is_none() {
            // A rank without the head has none of its own.
            self.send();
        }
        let losses = waiting.wait(self.work.take().expect("the losses were sent"))?;
        self.sums.clear();
        for places in self.order.chunks_exact(self.order.len() / self.num_steps) {
            places.iter().for_each(|&place| self.sum.push(losses[place], |left, right| *left += right));
            let sum = self.sum.finish(|left, right| *left += right);
            self.sums.push(sum.expect("a step has microbatches"));
        }
        self.buffer = Some(losses);
        Ok(&self.sums)
    }
}
