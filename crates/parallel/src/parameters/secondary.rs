//! Secondary shards: a copy of each gathered unit on every host, sharded among the host's ranks (hpZ: Wang et al., "ZeRO++", 2023, section
//! 3.2).

use crate::error::Result;
use crate::layout::HostLevels;
use crate::memory::{ExchangeVector, PendingVector};
use std::ops::Range;
use std::sync::Arc;
use trireme_base::DType;
use trireme_comm::Group;
use trireme_schedule::ProgramHeader;
use trireme_tensor::{Category, Device, ParameterTable, Tensor};

/// This rank's secondary shards of all units. A shard is valid from the first gather of its unit until the unit is updated.
pub(crate) struct SecondaryShards {
    host_group: Arc<Group>,
    device: Device,
    /// For each unit, this rank's range of the flat buffer.
    parts: Vec<Range<usize>>,
    shards: Vec<Tensor>,
    is_valid: Vec<bool>,
}

impl SecondaryShards {
    /// Allocates the shards in `dtype`. The ranks of a host together store all units of their pipeline stage.
    pub(crate) fn new(
        table: &ParameterTable,
        header: &ProgramHeader,
        levels: &HostLevels,
        device: &Device,
        dtype: DType,
    ) -> Result<Self> {
        let host_group = Arc::clone(&levels.within);
        let parts = table.shards(host_group.rank().0, host_group.world_size());
        let shard = |(unit, part): (usize, &Range<usize>)| {
            let len = if header.holds(unit) { part.len() } else { 0 };
            device.empty([len].into(), dtype, Category::Parameters)
        };
        let shards = parts.iter().enumerate().map(shard).collect::<Result<_, _>>()?;
        let is_there = vec![false; parts.len()];
        Ok(SecondaryShards { host_group, device: device.clone(), parts, shards, is_valid: is_there })
    }

    pub(crate) fn has(&self, unit: usize) -> bool {
        self.is_valid[unit]
    }

    /// Starts to gather a unit from the secondary shards of this host. Collective over the ranks of the host.
    pub(crate) fn gather(&self, unit: usize, mut whole: ExchangeVector) -> PendingVector {
        let (shard, part, len) = (&self.shards[unit], self.parts[unit].clone(), whole.len());
        self.device.convert(shard.view(), whole.part_mut(part.clone()));
        whole.exchange(&self.device, part, 0..len, |whole| self.host_group.all_gather(whole))
    }

    /// Stores this rank's secondary shard of a unit that was gathered.
    pub(crate) fn keep(&mut self, unit: usize, whole: &ExchangeVector) {
        let shard = &mut self.shards[unit];
        self.device.convert(whole.part(self.parts[unit].clone()), shard.view_mut());
        self.is_valid[unit] = true;
    }

    pub(crate) fn invalidate(&mut self, unit: usize) {
        self.is_valid[unit] = false;
    }
}
