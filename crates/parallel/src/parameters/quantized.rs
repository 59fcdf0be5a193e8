//! Gathers units as integers, across hosts and then within them (qwZ: Wang et al., "ZeRO++", 2023, section 3.1), so that each shard is sent
//! only once to every other host.

use crate::error::Result;
use crate::layout::HostLevels;
use crate::memory::{ExchangeVector, PendingVector, Pool, WaitTracker};
use trireme_base::DType;
use trireme_tensor::{Category, Device, IntegerFormat, UnitInfo, View};

/// The format of gathered parameters, as in the paper: half the bytes of a 16-bit float.
pub(crate) const PARAMETER_FORMAT: IntegerFormat = IntegerFormat::Int8;

/// Returns the bytes reserved for the message of one shard: enough for the longest shard.
pub(crate) fn slot_bytes(unit: &UnitInfo, num_shards: usize, format: IntegerFormat) -> usize {
    format.num_bytes(unit.padded_len().div_ceil(num_shards))
}

/// Gathers units in two steps. Each rank contributes its shard as a message of integers.
///
/// For a unit of `P` bytes as integers, each of `H` hosts sends and receives `(H - 1) / H * P` bytes.
pub(crate) struct QuantizedGather {
    /// The shards in the order of their messages: by local rank, then by host.
    order: Vec<usize>,
    own: usize,
    /// Memory for the messages of one rank per host.
    across_messages: Pool,
    /// Memory for the messages of all ranks.
    within_messages: Pool,
}

impl QuantizedGather {
    pub(crate) fn new(levels: &HostLevels, device: &Device) -> Self {
        let (within, across) = (&levels.within, &levels.across);
        let (num_local, num_hosts) = (within.world_size(), across.world_size());
        let order =
            (0..num_local * num_hosts).map(|place| levels.shard(place % num_hosts, place / num_hosts));
        QuantizedGather {
            order: order.collect(),
            own: levels.shard(across.rank().0, within.rank().0),
            across_messages: Pool::in_group_memory(across, device, DType::U8, Category::Communication, true),
            within_messages: Pool::in_group_memory(within, device, DType::U8, Category::Communication, true),
        }
    }

    /// Starts to gather a unit across hosts. This rank contributes `shard`, in f32. Collective.
    pub(crate) fn start(&self, unit: &UnitInfo, shard: View<'_>) -> Result<PendingVector> {
        let (across, slot_bytes) =
            (self.across_messages.group(), slot_bytes(unit, self.order.len(), PARAMETER_FORMAT));
        let mut messages = self.across_messages.take(slot_bytes * across.world_size())?;
        let num_bytes = PARAMETER_FORMAT.num_bytes(unit.shard(self.own, self.order.len()).len());
        let first = across.rank().0 * slot_bytes;
        self.within_messages.device().quantize(
            shard,
            PARAMETER_FORMAT,
            messages.part_mut(first..first + num_bytes),
        );
        let len = messages.len();
        let gather = |messages| across.all_gather(messages);
        Ok(messages.exchange(self.within_messages.device(), first..first + slot_bytes, 0..len, gather))
    }

    /// Waits for the messages of other hosts, gathers them within this host, and writes all values to `whole`. Collective.
    pub(crate) fn finish(
        &self,
        unit: &UnitInfo,
        of_hosts: PendingVector,
        whole: &mut ExchangeVector,
        waiting: &mut WaitTracker,
    ) -> Result<()> {
        let slot_bytes = slot_bytes(unit, self.order.len(), PARAMETER_FORMAT);
        let all = self.within_messages.take(slot_bytes * self.order.len())?;
        let len = all.len();
        // Messages of other hosts are passed on within this host unchanged.
        let (of_hosts, of_hosts_part) = of_hosts.wait_on_host(waiting)?;
        let (all, all_part) = all.begin_exchange(self.within_messages.device(), 0..0, 0..len);
        let (of_hosts, all) = waiting.wait(self.within_messages.group().all_gather_into(of_hosts, all))?;
        let of_hosts = ExchangeVector::end_exchange(
            of_hosts.into_memory()?,
            of_hosts_part,
            self.within_messages.device(),
        );
        let all = ExchangeVector::end_exchange(all.into_memory()?, all_part, self.within_messages.device());
        for (place, &shard) in self.order.iter().enumerate() {
            let part = unit.shard(shard, self.order.len());
            let first = place * slot_bytes;
            let message = all.part(first..first + PARAMETER_FORMAT.num_bytes(part.len()));
            self.within_messages.device().dequantize(message, PARAMETER_FORMAT, whole.part_mut(part));
        }
        self.across_messages.release(of_hosts);
        self.within_messages.release(all);
        Ok(())
    }
}
