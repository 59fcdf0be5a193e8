//! Full units, all-gathered from the shards of the ranks.
//!
//! Step programs do not mention ZeRO++. `UNSHARD` gathers a unit from its nearest complete copy: from the host's [secondary
//! shards](SecondaryShards) once they exist, else as [integers](QuantizedGather) across hosts and then within them, else from the shards of
//! all ranks. `docs/zero.md` has the formulas and measurements.

use super::ReplicatedParameters;
use super::quantized::QuantizedGather;
use super::secondary::SecondaryShards;
use crate::error::Result;
use crate::layout::RankGrid;
use crate::memory::{ExchangeVector, PendingVector, Pool, WaitTracker, on_device};
use crate::step::ZeroPlusPlus;
use std::fmt;
use std::sync::Arc;
use trireme_base::DType;
use trireme_comm::Group;
use trireme_schedule::collective::block;
use trireme_schedule::{ProgramHeader, StateClass};
use trireme_tensor::{Category, CowTensor, Device, ParameterTable, View, ViewMut};

/// Full units in one dtype, all-gathered from shards.
pub(crate) struct GatheredUnits {
    table: Arc<ParameterTable>,
    units: Vec<GatheredUnit>,
    /// For each unit, the ranks that store its shards.
    groups: Vec<Arc<Group>>,
    /// Whether gathered units stay allocated.
    pub(super) is_kept: bool,
    pool: Pool,
    /// Gathers units as integers, if weights are quantized. Secondary shards take precedence.
    quantized: Option<QuantizedGather>,
    /// Replicated parameters that quantization would make different on different ranks, because scales depend on neighboring elements. The
    /// first rank's values are broadcast.
    block_rounded: ReplicatedParameters,
    secondary: Option<SecondaryShards>,
}

#[derive(Default)]
enum GatheredUnit {
    #[default]
    Absent,
    Present(ExchangeVector),
    Gathering(PendingVector),
    /// Being gathered across hosts, as integers.
    GatheringQuantized(PendingVector),
}

impl GatheredUnits {
    pub(crate) fn new(
        table: &Arc<ParameterTable>,
        header: &ProgramHeader,
        methods: ZeroPlusPlus,
        ranks: &RankGrid,
        device: &Device,
        dtype: DType,
    ) -> Result<Self> {
        let is_kept = !header.state.is_sharded(StateClass::Parameters);
        let category = if is_kept { Category::Parameters } else { Category::Communication };
        let pool = Pool::new(ranks.shards(), device, dtype, category, true);
        let mut gathered = GatheredUnits { is_kept, ..GatheredUnits::empty(table, ranks, &pool) };
        (0..table.units().len()).try_for_each(|unit| gathered.reset_unit(unit, header.holds(unit)))?;
        // On a single host, secondary shards would save no traffic between hosts.
        if let Some(levels) = &ranks.levels {
            let has_secondary = methods.secondary_shards && levels.across.world_size() > 1;
            if methods.quantized_weights {
                gathered.quantized = Some(QuantizedGather::new(levels, device));
                gathered.block_rounded = ReplicatedParameters::all(table, ranks, device, dtype);
            }
            gathered.secondary = has_secondary
                .then(|| SecondaryShards::new(table, header, levels, device, dtype))
                .transpose()?;
        }
        Ok(gathered)
    }

    /// Creates a set without any unit. Memory of units comes from `pool`.
    pub(crate) fn empty(table: &Arc<ParameterTable>, ranks: &RankGrid, pool: &Pool) -> Self {
        let group = |unit| Arc::clone(&ranks.state_of(unit).shards);
        GatheredUnits {
            groups: table.units().iter().map(group).collect(),
            table: Arc::clone(table),
            units: table.units().iter().map(|_| GatheredUnit::default()).collect(),
            is_kept: false,
            pool: pool.clone(),
            quantized: None,
            block_rounded: ReplicatedParameters::none(table),
            secondary: None,
        }
    }

    /// Starts to all-gather a unit from the shards, without quantization.
    fn gather(&mut self, unit: usize, shard: Option<View<'_>>) -> Result<GatheredUnit> {
        let info = &self.table.units()[unit];
        let mut whole = match std::mem::take(&mut self.units[unit]) {
            GatheredUnit::Present(whole) => whole,
            _ => self.pool.take(info.padded_len())?,
        };
        let (group, len) = (&self.groups[unit], whole.len());
        if let Some(shard) = shard {
            let own = info.shard(group.rank().0, group.world_size());
            self.pool.device().convert(shard, whole.part_mut(own));
        }
        let own = block(group.rank(), group.world_size(), len);
        Ok(GatheredUnit::Gathering(
            whole.exchange(self.pool.device(), own, 0..len, |whole| group.all_gather(whole)),
        ))
    }

    /// Frees the memory of a unit, and allocates it again if this rank `holds` the unit and units stay allocated.
    pub(crate) fn reset_unit(&mut self, unit: usize, holds: bool) -> Result<()> {
        if let GatheredUnit::Present(whole) = std::mem::take(&mut self.units[unit]) {
            self.pool.discard(whole);
        }
        if holds && self.is_kept {
            self.units[unit] = GatheredUnit::Present(self.pool.take(self.table.units()[unit].padded_len())?);
        }
        Ok(())
    }

    /// Starts to gather a unit. `shard` is this rank's shard and the device that stores it; with `None`, the shard is already in the unit's
    /// memory.
    pub(crate) fn unshard(&mut self, unit: usize, shard: Option<(View<'_>, &Device)>) -> Result<()> {
        let category = Category::Communication;
        let local_shard =
            shard.map(|(shard, from)| on_device(shard, from, self.pool.device(), category)).transpose()?;
        let shard = local_shard.as_ref().map(CowTensor::view);
        let info = &self.table.units()[unit];
        self.units[unit] = match (&self.secondary, &self.quantized, shard) {
            (Some(secondary), ..) if secondary.has(unit) => {
                GatheredUnit::Gathering(secondary.gather(unit, self.pool.take(info.padded_len())?))
            }
            (_, Some(quantized), Some(shard)) => {
                GatheredUnit::GatheringQuantized(quantized.start(info, shard)?)
            }
            (_, _, shard) => self.gather(unit, shard)?,
        };
        Ok(())
    }

    /// Waits until kernels may read a unit.
    pub(crate) fn await_unit(&mut self, unit: usize, waiting: &mut WaitTracker) -> Result<()> {
        let whole = match std::mem::take(&mut self.units[unit]) {
            GatheredUnit::Gathering(pending) => pending.wait(self.pool.device(), waiting)?,
            GatheredUnit::GatheringQuantized(messages) => {
                let info = &self.table.units()[unit];
                let mut whole = self.pool.take(info.padded_len())?;
                let quantized = self.quantized.as_ref().expect("it was packed by this");
                quantized.finish(info, messages, &mut whole, waiting)?;
                let all = 0..info.num_elements;
                let values = whole.part_mut(all.clone());
                self.block_rounded.broadcast_first(unit, values, all, waiting)?;
                whole
            }
            other => {
                self.units[unit] = other;
                return Ok(());
            }
        };
        if let Some(secondary) = self.secondary.as_mut().filter(|secondary| !secondary.has(unit)) {
            secondary.keep(unit, &whole);
        }
        self.units[unit] = GatheredUnit::Present(whole);
        Ok(())
    }

    pub(crate) fn reshard(&mut self, unit: usize) {
        if let GatheredUnit::Present(whole) = std::mem::take(&mut self.units[unit]) {
            self.pool.release(whole);
        }
    }

    /// Invalidates the secondary shards of a unit whose parameters have changed.
    pub(crate) fn invalidate(&mut self, unit: usize) {
        if let Some(secondary) = &mut self.secondary {
            secondary.invalidate(unit);
        }
    }

    /// Returns the elements of a gathered unit, without padding.
    ///
    /// # Panics
    /// If the unit is not gathered.
    pub(crate) fn view(&self, unit: usize) -> View<'_> {
        let len = self.table.units()[unit].num_elements;
        match &self.units[unit] {
            GatheredUnit::Present(whole) => whole.part(0..len),
            _ => panic!("unit {unit} is read while it is not there"),
        }
    }

    pub(crate) fn view_mut(&mut self, unit: usize) -> ViewMut<'_> {
        let len = self.table.units()[unit].num_elements;
        match &mut self.units[unit] {
            GatheredUnit::Present(whole) => whole.part_mut(0..len),
            _ => panic!("unit {unit} is written while it is not there"),
        }
    }
}

impl fmt::Debug for GatheredUnits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let present = self.units.iter().map(|whole| matches!(whole, GatheredUnit::Present(_)));
        write!(f, "Gathered({:?})", present.collect::<Vec<_>>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Degrees;
    use trireme_base::AxisSplit;
    use trireme_schedule::lowering::apply_layout;
    use trireme_schedule::{StateLayout, UnitChain, single};
    use trireme_tensor::{DeviceOptions, Initial, Parameter};
    use trireme_testkit::run_ranks_on;

    #[test]
    fn quantized_replicated_parameters_are_equal_on_all_ranks() {
        let found = run_ranks_on(&[0, 0, 0, 0, 1, 1, 1, 1], |group| {
            let degrees = Degrees { shards: 4, tensor: 2, ..Degrees::ONE };
            let mut ranks = RankGrid::new(group, degrees).unwrap();
            let place = ranks.model_rank().tensor;
            let mut table = ParameterTable::for_rank(place);
            table.begin_unit("unit");
            table.add(Parameter::vector("norm", 64, Initial::ZEROS));
            table.add(Parameter::matrix("cut", &[64, 8], Initial::ZEROS).with_split(AxisSplit::along(0)));
            ranks.split_by_hosts().unwrap();
            ranks.split_replicated_parameters(&table).unwrap();
            let (table, own) = (Arc::new(table), ranks.shards().rank().0);
            let header =
                apply_layout(single::program(&UnitChain::of_units(1), 1), StateLayout::zero(3)).header;
            let device = Device::cpu(DeviceOptions { num_threads: 1, ..DeviceOptions::default() }).unwrap();
            let methods = ZeroPlusPlus { quantized_weights: true, ..ZeroPlusPlus::NONE };
            let mut gathered =
                GatheredUnits::new(&table, &header, methods, &ranks, &device, DType::F32).unwrap();
            // Elements of the split parameter are larger on one rank of the axis, and so are the rounding steps of the whole quantization
            // block.
            let value =
                |index: usize| if index < 64 { index as f32 / 7.0 } else { 100.0 * (1 + place.rank) as f32 };
            let shard: Vec<f32> = table.units()[0].shard(own, 4).map(value).collect();
            let view = View::from_f32s(&shard, [shard.len()].into());
            gathered.unshard(0, Some((view, &device))).unwrap();
            gathered.await_unit(0, &mut WaitTracker::default()).unwrap();
            device.read::<u32>(gathered.view(0).part(0, [64].into())).unwrap()
        });
        assert!(found.chunks(2).all(|pair| pair[0] == pair[1]));
    }
}
