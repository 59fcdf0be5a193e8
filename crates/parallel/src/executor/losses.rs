//! The losses of a step's microbatches, and their sum.

use crate::error::ParallelError;
use crate::ranks::RankGrid;
use crate::tree::TreeSum;
use crate::waiting::Waiting;
use std::sync::Arc;
use trireme_base::Rank;
use trireme_comm::{Buffer, Group, Work};
use trireme_schedule::{Outline, ZeroStage};

/// The place among all microbatches of a step of microbatch `index` of the data-parallel `rank`.
pub(super) fn global_microbatch(outline: &Outline, ranks: &RankGrid, rank: Rank, index: usize) -> usize {
    let num_shards = ranks.shards().world_size();
    match outline.zero_stage {
        ZeroStage::Zero | ZeroStage::One => rank.0 * outline.num_microbatches + index,
        ZeroStage::Two | ZeroStage::Three => {
            let (replica, shard) = (rank.0 / num_shards, rank.0 % num_shards);
            (replica * outline.num_microbatches + index) * num_shards + shard
        }
    }
}

/// Losses of all microbatches of a step, gathered from all ranks, so that they are summed in the one order of the
/// microbatches.
pub(super) struct Losses {
    world: Arc<Group>,
    num_microbatches: usize,
    /// For each microbatch of the step, which of the gathered losses is its one: of a rank with the head.
    order: Vec<usize>,
    /// Losses of this rank that this step has taken in.
    num_taken: usize,
    /// Present while nothing is under way.
    buffer: Option<Buffer<f64>>,
    work: Option<Work<Buffer<f64>>>,
    sum: TreeSum<f64>,
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
        Ok(Losses { world, num_microbatches, order, num_taken: 0, buffer, work: None, sum: TreeSum::new() })
    }

    /// Takes in the loss of this rank's microbatch `index`; the last one sends them all.
    pub(super) fn push(&mut self, index: usize, loss: f64) {
        let buffer = self.buffer.as_mut().expect("losses are gathered once a step");
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

    /// Waits for the losses of all ranks: their sum.
    pub(super) fn wait(&mut self, waiting: &mut Waiting) -> Result<f64, ParallelError> {
        if self.work.is_none() {
            // A rank without the head has none of its own.
            self.send();
        }
        let losses = waiting.wait(self.work.take().expect("the losses were sent"))?;
        for &place in &self.order {
            self.sum.push(losses[place], |left, right| *left += right);
        }
        self.buffer = Some(losses);
        Ok(self.sum.finish(|left, right| *left += right).expect("a step has microbatches"))
    }
}
