//! Sums a unit's gradient over the ranks of the shards as integers, level by level (qgZ: Wang et al., "ZeRO++", 2023, section 3.3). A host
//! sends sums over its ranks to other hosts.

use crate::error::Result;
use crate::layout::HostLevels;
use crate::memory::{ExchangeVector, PendingVector, Pool, WaitTracker};
use crate::parameters::slot_bytes;
use std::sync::Arc;
use trireme_base::DType;
use trireme_comm::Group;
use trireme_tensor::{Category, Device, IntegerFormat, UnitInfo};

/// A group of ranks that exchange quantized gradients by all-to-all. Each sums the parts that it receives.
struct Level {
    /// For each rank of the group, the shards that it sums.
    shards_of: Vec<Vec<usize>>,
    messages: Pool,
}

pub(crate) struct Hierarchy {
    format: IntegerFormat,
    num_shards: usize,
    device: Device,
    /// The level within hosts, then the level across hosts. A level of one rank is left out.
    levels: Vec<Level>,
}

impl Hierarchy {
    pub(crate) fn new(levels: &HostLevels, format: IntegerFormat, device: &Device) -> Self {
        let (num_local, num_hosts) = (levels.within.world_size(), levels.across.world_size());
        let of_local = |local| (0..num_hosts).map(|host| levels.shard(host, local)).collect();
        let of_host = |host| Vec::from([levels.shard(host, levels.within.rank().0)]);
        let level = |group: &Arc<Group>, shards_of| Level {
            shards_of,
            messages: Pool::new(group, device, DType::U8, Category::Communication, true),
        };
        let within = level(&levels.within, (0..num_local).map(of_local).collect());
        let across = level(&levels.across, (0..num_hosts).map(of_host).collect());
        let levels = [within, across].into_iter().filter(|level| level.messages.group().world_size() > 1);
        Hierarchy {
            format,
            num_shards: num_local * num_hosts,
            device: device.clone(),
            levels: levels.collect(),
        }
    }
}

/// The quantized reduction of one unit's gradient. It is reused in every step.
///
/// For a gradient of `P` bytes as integers, on `H` hosts with `L` ranks each, a rank sends `(L - 1) / L * P` bytes to the other ranks of
/// its host, and `(H - 1) / H * P / L` bytes to other hosts. The gradient is rounded at each level.
pub(crate) struct HierarchicalReduction {
    hierarchy: Arc<Hierarchy>,
    unit: UnitInfo,
    slot_bytes: usize,
    pending: Option<PendingLevel>,
}

struct PendingLevel {
    gradient: ExchangeVector,
    level: usize,
    messages: PendingVector,
}

impl HierarchicalReduction {
    pub(crate) fn new(hierarchy: &Arc<Hierarchy>, unit: &UnitInfo) -> Self {
        let slot_bytes = slot_bytes(unit, hierarchy.num_shards, hierarchy.format);
        HierarchicalReduction {
            hierarchy: Arc::clone(hierarchy),
            unit: unit.clone(),
            slot_bytes,
            pending: None,
        }
    }

    /// Waits for the level in flight, and starts the next one. After the last level, returns the gradient, in which this rank's shard is
    /// the sum over all ranks.
    pub(crate) fn advance(&mut self, waiting: &mut WaitTracker) -> Result<Option<ExchangeVector>> {
        let PendingLevel { mut gradient, level, messages } =
            self.pending.take().expect("a reduction was started");
        let messages = messages.wait(&self.hierarchy.device, waiting)?;
        self.add_up(&mut gradient, &self.hierarchy.levels[level], &messages);
        self.hierarchy.levels[level].messages.release(messages);
        if level + 1 == self.hierarchy.levels.len() {
            return Ok(Some(gradient));
        }
        self.start(gradient, level + 1)?;
        Ok(None)
    }

    /// Starts a level. The first level starts with this rank's `gradient`, later ones with the sums of the level before.
    pub(crate) fn start(&mut self, gradient: ExchangeVector, level: usize) -> Result<()> {
        let Hierarchy { device, format, num_shards, levels } = &*self.hierarchy;
        let Level { shards_of, messages: pool } = &levels[level];
        let num_slots: usize = shards_of.iter().map(Vec::len).sum();
        let mut messages = pool.take(num_slots * self.slot_bytes)?;
        for (slot, &shard) in shards_of.iter().flatten().enumerate() {
            let part = self.unit.shard(shard, *num_shards);
            let first = slot * self.slot_bytes;
            let message = messages.part_mut(first..first + format.num_bytes(part.len()));
            device.quantize(gradient.part(part), *format, message);
        }
        let len = messages.len();
        let swap = |messages| pool.group().all_to_all(messages);
        let messages = messages.exchange(device, 0..len, 0..len, swap);
        self.pending = Some(PendingLevel { gradient, level, messages });
        Ok(())
    }

    /// Sums the messages that the ranks of a level have sent, in rank order.
    fn add_up(&self, gradient: &mut ExchangeVector, level: &Level, messages: &ExchangeVector) {
        let Hierarchy { device, format, num_shards, .. } = &*self.hierarchy;
        let own = &level.shards_of[level.messages.group().rank().0];
        for source in 0..level.messages.group().world_size() {
            for (place, &shard) in own.iter().enumerate() {
                let part = self.unit.shard(shard, *num_shards);
                let first = (source * own.len() + place) * self.slot_bytes;
                let message = messages.part(first..first + format.num_bytes(part.len()));
                let sum = gradient.part_mut(part);
                match source {
                    0 => device.dequantize(message, *format, sum),
                    _ => device.add_dequantized(message, *format, sum),
                }
            }
        }
    }
}
