//! Updates of units.

use super::pool::Pool;
use crate::setup::MemorySetup;
use crate::usage::Usage;
use std::collections::BTreeMap;
use trireme_base::Category;
use trireme_schedule::StateClass;

#[derive(Debug)]
pub(super) struct Updates<'a> {
    setup: &'a MemorySetup,
    /// By the bytes of an element.
    pools: BTreeMap<usize, Pool>,
}

impl<'a> Updates<'a> {
    pub(super) fn new(setup: &'a MemorySetup) -> Self {
        Updates { setup, pools: BTreeMap::new() }
    }

    pub(super) fn step(&mut self, unit: usize, usage: &mut Usage) {
        let (setup, unit) = (self.setup, &self.setup.units[unit]);
        // What the host updates takes its memory.
        let scratch = if setup.is_away(StateClass::Optimizer) { 0 } else { unit.step_scratch };
        usage.take(Category::Optimizer, scratch);
        let exchanges = if setup.num_shards > 1 { &unit.step_exchanges[..] } else { &[] };
        for exchange in exchanges {
            let (category, is_mapped) = (Category::Communication, setup.shards_share_memory);
            let new = || Pool::new(category, exchange.element_bytes, setup.num_shards, is_mapped);
            let pool = self.pools.entry(exchange.element_bytes).or_insert_with(new);
            pool.take(exchange.len, usage);
            pool.give(exchange.len);
        }
        usage.give(Category::Optimizer, scratch);
    }
}
