use crate::error::ParallelError;
use crate::pool::Pool;
use crate::ranks::RankGrid;
use std::ops::Range;
use trireme_base::{AxisPlace, DType, Pending, ReduceOp};
use trireme_comm::Buffer;
use trireme_optim::ShardOps;
use trireme_schedule::Outline;
use trireme_tensor::{Category, Device, LEAVES, ParameterInfo, View, ViewMut};

/// What an optimizer exchanges with those of the other shards, if the update is sharded.
pub(crate) struct ShardExchange {
    /// What updates run on.
    device: Device,
    /// Of those of the other shards, and of the tensor axis.
    sums: [Pool<f64>; 2],
    wholes: Pool<f32>,
    parts: Pool<f32>,
}

impl ShardExchange {
    /// For updates on `device`; memory for messages is counted on `counted`.
    pub(crate) fn new(ranks: &RankGrid, outline: &Outline, device: &Device, counted: &Device) -> Self {
        let (group, tensor) = (ranks.updating(outline), ranks.tensor());
        let sums = [group, tensor].map(|group| Pool::new(group, counted, Category::Communication, true));
        let [wholes, parts] =
            [group, tensor].map(|group| Pool::new(group, counted, Category::Communication, true));
        ShardExchange { device: device.clone(), sums, wholes, parts }
    }
}

impl ShardOps for ShardExchange {
    type Error = ParallelError;

    fn sum(&mut self, mut values: ViewMut<'_>) -> Result<(), ParallelError> {
        let len = values.shape().num_elements();
        for pool in self.sums.iter().filter(|pool| pool.group().world_size() > 1) {
            let mut buffer = pool.take_buffer(len)?;
            self.device.download_later(values.as_view(), &mut buffer, 0);
            let work = pool.group().all_reduce(Buffer::pending(buffer, len), ReduceOp::Sum);
            let mut buffer = Pending::new(work.wait()?);
            self.device.upload_later(&mut buffer, 0, values.reborrow());
            self.device.wait_for(&buffer.event());
            pool.give_buffer(len, buffer);
        }
        Ok(())
    }

    fn gather(&mut self, mut whole: ViewMut<'_>, part: Range<usize>) -> Result<(), ParallelError> {
        if self.wholes.group().world_size() == 1 {
            return Ok(());
        }
        // As long as shards of whole leaves make up.
        let len = whole.shape().num_elements();
        let buffer_len = len.next_multiple_of(LEAVES);
        let mut buffer = self.wholes.take_buffer(buffer_len)?;
        let own = whole.reborrow().into_part(part.start, [part.len()].into());
        self.device.download_later(own.as_view(), &mut buffer, part.start * DType::F32.size());
        let work = self.wholes.group().all_gather(Buffer::pending(buffer, buffer_len));
        let mut buffer = Pending::new(work.wait()?);
        self.device.upload_later(&mut buffer, 0, whole);
        self.device.wait_for(&buffer.event());
        self.wholes.give_buffer(buffer_len, buffer);
        Ok(())
    }

    fn join(
        &mut self,
        info: &ParameterInfo,
        part: View<'_>,
        whole: ViewMut<'_>,
    ) -> Result<(), ParallelError> {
        let AxisPlace { rank, degree } = info.place;
        let len = part.shape().num_elements();
        let mut buffer = self.parts.take_buffer(degree * len)?.wait();
        self.device.download(part, &mut buffer[rank * len..(rank + 1) * len]);
        let buffer = self.parts.group().all_gather(buffer).wait()?;
        self.device.fill(whole, |values| {
            for info in AxisPlace::all(degree).map(|place| info.at(place)) {
                let part = &buffer[info.place.rank * len..];
                info.runs(0..len)
                    .for_each(|(first, run)| values[first..][..run.len()].copy_from_slice(&part[run]));
            }
            Ok::<_, ParallelError>(())
        })?;
        self.parts.give_buffer(buffer.len(), Pending::new(buffer));
        Ok(())
    }
}
