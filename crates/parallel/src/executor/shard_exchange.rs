use crate::error::{ParallelError, Result};
use crate::layout::{DenseAndExpert, RankGrid, StateRanks};
use crate::memory::Pool;
use std::ops::Range;
use std::sync::Arc;
use trireme_base::{AxisRank, DType, Pending, ReduceOp};
use trireme_comm::Group;
use trireme_optim::ShardOps;
use trireme_schedule::ProgramHeader;
use trireme_tensor::{Category, Device, NUM_LEAVES, ParameterInfo, View, ViewMut};

/// The exchanges of an optimizer's update between the ranks of the shards and of the tensor axis.
pub(super) struct ShardExchange {
    device: Device,
    /// Memory for sums over the ranks that update a unit together, and over the tensor axis.
    sums: [Pool; 2],
    shard_gathers: Pool,
    tensor_gathers: Pool,
}

impl ShardExchange {
    /// Creates the exchanges for updates that run on `device`. Memory of messages is counted on `counted`.
    pub(super) fn of_units(
        ranks: &RankGrid,
        header: &ProgramHeader,
        device: &Device,
        counted: &Device,
    ) -> DenseAndExpert<Self> {
        let host_pool = |group: &Arc<Group>, dtype| {
            Pool::in_group_memory(group, counted, dtype, Category::Communication, true)
        };
        let new = if device.is_same(counted) { Pool::new } else { Pool::in_group_memory };
        let exchange = |state: &StateRanks| {
            let groups = [state.update_group(header), ranks.tensor()];
            // Devices do not reduce f64, and matrices are put together on the host.
            let sums = groups.map(|group| host_pool(group, DType::F64));
            let gathers = new(groups[0], counted, DType::F32, Category::Communication, true);
            let parts = host_pool(groups[1], DType::F32);
            ShardExchange { device: device.clone(), sums, shard_gathers: gathers, tensor_gathers: parts }
        };
        let DenseAndExpert { dense, experts } = &ranks.state;
        DenseAndExpert { dense: exchange(dense), experts: experts.as_ref().map(exchange) }
    }
}

impl ShardOps for ShardExchange {
    type Error = ParallelError;

    fn sum(&mut self, mut values: ViewMut<'_>) -> Result<()> {
        let len = values.shape().num_elements();
        for pool in self.sums.iter().filter(|pool| pool.group().world_size() > 1) {
            let buffer = pool.copy_to_buffer(&self.device, values.as_view(), 0, len)?;
            let buffer = pool.group().all_reduce(buffer, ReduceOp::Sum).wait()?;
            pool.copy_from_buffer(&self.device, buffer.into_memory()?, len, 0, values.reborrow());
        }
        Ok(())
    }

    fn gather(&mut self, mut whole: ViewMut<'_>, part: Range<usize>) -> Result<()> {
        if self.shard_gathers.group().world_size() == 1 {
            return Ok(());
        }
        // Shards consist of full leaves of the summation tree, so the exchanged length is a multiple of the number of leaves.
        let len = whole.shape().num_elements();
        let len_exchanged = len.next_multiple_of(NUM_LEAVES);
        let own = whole.reborrow().into_part(part.start, [part.len()].into());
        let buffer =
            self.shard_gathers.copy_to_buffer(&self.device, own.as_view(), part.start, len_exchanged)?;
        let buffer = self.shard_gathers.group().all_gather(buffer).wait()?;
        self.shard_gathers.copy_from_buffer(&self.device, buffer.into_memory()?, len_exchanged, 0, whole);
        Ok(())
    }

    fn gather_matrix(&mut self, info: &ParameterInfo, part: View<'_>, whole: ViewMut<'_>) -> Result<()> {
        let AxisRank { rank, degree } = info.tensor_rank;
        let len = part.shape().num_elements();
        let buffer = self.tensor_gathers.copy_to_buffer(&self.device, part, rank * len, degree * len)?;
        let buffer = self.tensor_gathers.group().all_gather(buffer).wait()?;
        self.device.fill(whole, |values| {
            for info in AxisRank::all(degree).map(|place| info.at(place)) {
                let part = &buffer.elements::<f32>()[info.tensor_rank.rank * len..];
                info.runs(0..len)
                    .for_each(|(first, run)| values[first..][..run.len()].copy_from_slice(&part[run]));
            }
            Ok::<_, ParallelError>(())
        })?;
        self.tensor_gathers.release_buffer(buffer.len(), Pending::new(buffer));
        Ok(())
    }
}
