use crate::error::ParallelError;
use crate::pool::Pool;
use crate::ranks::RankGrid;
use std::ops::Range;
use trireme_base::{Pending, ReduceOp};
use trireme_optim::ShardOps;
use trireme_schedule::Outline;
use trireme_tensor::{Category, Device, LEAVES, ViewMut};

/// What an optimizer exchanges with those of the other shards, if the update is sharded.
pub(crate) struct ShardExchange {
    /// What updates run on.
    device: Device,
    sums: Pool<f64>,
    wholes: Pool<f32>,
}

impl ShardExchange {
    /// For updates on `device`; memory for messages is counted on `counted`.
    pub(crate) fn new(ranks: &RankGrid, outline: &Outline, device: &Device, counted: &Device) -> Self {
        let group = ranks.updating(outline);
        let sums = Pool::new(group, counted, Category::Communication, true);
        let wholes = Pool::new(group, counted, Category::Communication, true);
        ShardExchange { device: device.clone(), sums, wholes }
    }
}

impl ShardOps for ShardExchange {
    type Error = ParallelError;

    fn sum(&mut self, values: &mut [f64]) -> Result<(), ParallelError> {
        if self.sums.group().world_size() == 1 {
            return Ok(());
        }
        let mut buffer = self.sums.take_buffer(values.len())?.wait();
        buffer.copy_from_slice(values);
        let buffer = self.sums.group().all_reduce(buffer, ReduceOp::Sum).wait()?;
        values.copy_from_slice(&buffer);
        self.sums.give_buffer(buffer.len(), Pending::new(buffer));
        Ok(())
    }

    fn gather(&mut self, mut whole: ViewMut<'_>, part: Range<usize>) -> Result<(), ParallelError> {
        if self.wholes.group().world_size() == 1 {
            return Ok(());
        }
        // As long as shards of whole leaves make up.
        let len = whole.shape().num_elements();
        let mut buffer = self.wholes.take_buffer(len.next_multiple_of(LEAVES))?.wait();
        let own = whole.reborrow().into_part(part.start, [part.len()].into());
        self.device.download(own.as_view(), &mut buffer[part]);
        let buffer = self.wholes.group().all_gather(buffer).wait()?;
        self.device.upload(&buffer[..len], whole);
        self.wholes.give_buffer(buffer.len(), Pending::new(buffer));
        Ok(())
    }
}
