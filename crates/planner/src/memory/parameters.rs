//! Parameters of a rank: what it steps, and what its operations read.

use super::hierarchy::PackedGathering;
use super::pool::Pool;
use crate::setup::MemorySetup;
use crate::usage::Usage;
use trireme_base::{Category, DType};
use trireme_schedule::{Action, Outline, StateClass, ZeroStage};

/// Where a whole unit is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Whole {
    Absent,
    /// On its way as integers, to memory that is taken when they have come.
    Packed,
    /// Here, or on its way to its memory.
    Present,
}

#[derive(Debug)]
pub(super) struct Parameters<'a> {
    setup: &'a MemorySetup,
    /// Whole units, where they are gathered.
    wholes: Option<Pool>,
    packed: Option<PackedGathering>,
    units: Vec<Whole>,
    /// For each unit: its host has a copy. That it is out of date after a step takes no more: the memory by which it was made is
    /// still there.
    is_near: Vec<bool>,
    /// For each unit: copies of older versions, and memory that such copies have left.
    stashed: Vec<[usize; 2]>,
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
        let is_copied = |(reader, owner): &(usize, usize)| outline.holds(*reader) && !outline.holds(*owner);
        if let Some(tied) = setup.tied.filter(|_| outline.chain.ties.iter().any(is_copied)) {
            usage.take(Category::Parameters, tied.unit * DType::F32.size());
        }
        for &len in setup.levels.iter().filter_map(|levels| levels.secondary_lens.as_ref()).flatten() {
            usage.take(Category::Parameters, setup.elements_on_device(len, setup.gather_dtype));
        }
        let category = if is_kept { Category::Parameters } else { Category::Communication };
        let pool =
            Pool::new(category, setup.gather_dtype.size(), setup.num_shards, setup.shards_share_memory);
        let num_units = setup.units.len();
        let mut parameters = Parameters {
            setup,
            wholes: has_wholes.then_some(pool),
            packed: PackedGathering::new(setup),
            units: vec![Whole::Absent; num_units],
            is_near: vec![false; num_units],
            stashed: vec![[0; 2]; num_units],
        };
        if is_kept {
            (0..setup.units.len()).for_each(|unit| parameters.unshard(unit, usage));
        }
        parameters
    }

    pub(super) fn unshard(&mut self, unit: usize, usage: &mut Usage) {
        let Some(wholes) = self.wholes.as_mut().filter(|_| self.units[unit] == Whole::Absent) else { return };
        self.units[unit] = match &mut self.packed {
            Some(packed) if !self.is_near[unit] => {
                packed.start(unit, usage);
                Whole::Packed
            }
            _ => {
                wholes.take(self.setup.units[unit].padded_len, usage);
                Whole::Present
            }
        };
    }

    /// Waits for the units that an action works with.
    pub(super) fn await_units(&mut self, action: Action, outline: &Outline, usage: &mut Usage) {
        match action {
            Action::Reshard { unit } | Action::Step { unit } => self.ensure(unit, usage),
            _ => outline.reads(action).for_each(|unit| self.ensure(unit, usage)),
        }
    }

    fn ensure(&mut self, unit: usize, usage: &mut Usage) {
        if let (Some(wholes), Some(packed), Whole::Packed) =
            (&mut self.wholes, &mut self.packed, self.units[unit])
        {
            wholes.take(self.setup.units[unit].padded_len, usage);
            packed.finish(unit, usage);
            self.units[unit] = Whole::Present;
            self.is_near[unit] =
                self.setup.levels.as_ref().is_some_and(|levels| levels.secondary_lens.is_some());
        }
    }

    /// A copy of a unit's parameters is kept.
    pub(super) fn stash(&mut self, unit: usize, usage: &mut Usage) {
        let [copies, spare] = &mut self.stashed[unit];
        *copies += 1;
        match spare.checked_sub(1) {
            Some(left) => *spare = left,
            None => usage.take(Category::Parameters, self.setup.on_device(self.setup.units[unit].len)),
        }
    }

    /// Its memory is for another one.
    pub(super) fn unstash(&mut self, unit: usize) {
        let [copies, spare] = &mut self.stashed[unit];
        (*copies, *spare) = (*copies - 1, *spare + 1);
    }

    pub(super) fn reshard(&mut self, unit: usize) {
        if let (Some(wholes), Whole::Present) = (&mut self.wholes, self.units[unit]) {
            wholes.give(self.setup.units[unit].padded_len);
            self.units[unit] = Whole::Absent;
        }
    }
}
