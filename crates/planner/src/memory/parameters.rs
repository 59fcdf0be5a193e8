//! Parameters of a rank: what it steps, and what its operations read.

use super::pool::Pool;
use crate::setup::MemorySetup;
use crate::usage::Usage;
use trireme_base::{Category, DType};
use trireme_schedule::{Outline, StateClass, ZeroStage};

#[derive(Debug)]
pub(super) struct Parameters<'a> {
    setup: &'a MemorySetup,
    /// Whole units, where they are gathered.
    wholes: Option<Pool>,
    is_present: Vec<bool>,
}

impl<'a> Parameters<'a> {
    pub(super) fn new(setup: &'a MemorySetup, outline: &Outline, usage: &mut Usage) -> Self {
        for category in Category::ALL {
            usage.take(category, setup.fixed.get(category));
        }
        if !setup.is_away(StateClass::Optimizer) {
            usage.take(Category::Optimizer, setup.units.iter().map(|unit| unit.optimizer_bytes).sum());
        }
        let stage = outline.zero_stage;
        let is_wide = setup.gather_dtype == DType::F32;
        let is_kept = stage < ZeroStage::Three;
        // Beside narrow copies, what is stepped is state of the optimizer.
        let master = if is_wide { Category::Parameters } else { Category::Optimizer };
        // One shard is the whole.
        let has_wholes = stage != ZeroStage::Zero && (setup.num_shards > 1 || !is_kept);
        let class = if is_kept { StateClass::Optimizer } else { StateClass::Parameters };
        let is_away = setup.is_away(class);
        for unit in &setup.units {
            match stage {
                _ if !has_wholes => usage.take(Category::Parameters, setup.on_device(unit.len)),
                ZeroStage::One | ZeroStage::Two if is_wide => (),
                _ if is_away => (),
                _ => usage.take(master, setup.on_device(unit.shard_len)),
            }
        }
        let category = if is_kept { Category::Parameters } else { Category::Communication };
        let pool = Pool::new(category, setup.gather_dtype.size(), setup.num_shards, true);
        let is_present = vec![false; setup.units.len()];
        let mut parameters = Parameters { setup, wholes: has_wholes.then_some(pool), is_present };
        if is_kept {
            (0..setup.units.len()).for_each(|unit| parameters.unshard(unit, usage));
        }
        parameters
    }

    pub(super) fn unshard(&mut self, unit: usize, usage: &mut Usage) {
        if let (Some(pool), false) = (&mut self.wholes, self.is_present[unit]) {
            pool.take(self.setup, self.setup.units[unit].padded_len, usage);
            self.is_present[unit] = true;
        }
    }

    pub(super) fn reshard(&mut self, unit: usize) {
        if let (Some(pool), true) = (&mut self.wholes, self.is_present[unit]) {
            pool.give(self.setup.units[unit].padded_len);
            self.is_present[unit] = false;
        }
    }
}
