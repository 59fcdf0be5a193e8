//! Messages between the hosts of a replica and within them (ZeRO++).

use super::pool::Pool;
use crate::setup::{HostLevels, MemorySetup};
use crate::usage::Usage;
use trireme_base::Category;

/// An empty pool of messages between the ranks of a host.
fn within(levels: &HostLevels) -> Pool {
    Pool::new(Category::Communication, 1, levels.num_local, levels.shares_memory)
}

/// An empty pool of messages between hosts, one rank of each.
fn across(levels: &HostLevels) -> Pool {
    Pool::new(Category::Communication, 1, levels.num_hosts, false)
}

/// Sums of gradients as integers, level by level.
#[derive(Debug)]
pub(super) struct Hierarchy {
    /// Bytes of a message with one shard of each unit.
    message_bytes: Vec<usize>,
    /// Those with several ranks, within hosts first: messages, and how many shards they are of.
    levels: Vec<(Pool, usize)>,
}

impl Hierarchy {
    /// `None` if gradients are not summed as integers.
    pub(super) fn new(setup: &MemorySetup) -> Option<Self> {
        let levels = setup.levels.as_ref()?;
        let message_bytes = levels.gradient_messages.clone()?;
        let HostLevels { num_local, num_hosts, .. } = *levels;
        let all =
            [(num_local, (within(levels), num_local * num_hosts)), (num_hosts, (across(levels), num_hosts))];
        let levels = all.into_iter().filter(|(num_ranks, _)| *num_ranks > 1).map(|(_, level)| level);
        Some(Hierarchy { message_bytes, levels: levels.collect() })
    }

    pub(super) fn num_levels(&self) -> usize {
        self.levels.len()
    }

    pub(super) fn start(&mut self, unit: usize, level: usize, usage: &mut Usage) {
        let (messages, num_shards) = &mut self.levels[level];
        messages.take(*num_shards * self.message_bytes[unit], usage);
    }

    pub(super) fn finish(&mut self, unit: usize, level: usize) {
        let (messages, num_shards) = &mut self.levels[level];
        messages.give(*num_shards * self.message_bytes[unit]);
    }
}

/// Parameters that are gathered as integers, across hosts and then within them.
#[derive(Debug)]
pub(super) struct PackedGathering {
    message_bytes: Vec<usize>,
    num_hosts: usize,
    num_shards: usize,
    /// Messages of one rank of each host.
    of_hosts: Pool,
    /// Messages of all ranks.
    all: Pool,
}

impl PackedGathering {
    /// `None` if parameters are gathered as they are.
    pub(super) fn new(setup: &MemorySetup) -> Option<Self> {
        let levels = setup.levels.as_ref()?;
        let message_bytes = levels.parameter_messages.clone()?;
        let (num_hosts, num_shards) = (levels.num_hosts, setup.num_shards);
        let (of_hosts, all) = (across(levels), within(levels));
        Some(PackedGathering { message_bytes, num_hosts, num_shards, of_hosts, all })
    }

    pub(super) fn start(&mut self, unit: usize, usage: &mut Usage) {
        self.of_hosts.take(self.num_hosts * self.message_bytes[unit], usage);
    }

    pub(super) fn finish(&mut self, unit: usize, usage: &mut Usage) {
        let num_bytes = self.message_bytes[unit];
        self.all.take(self.num_shards * num_bytes, usage);
        self.all.give(self.num_shards * num_bytes);
        self.of_hosts.give(self.num_hosts * num_bytes);
    }
}
