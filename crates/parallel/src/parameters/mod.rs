//! The parameters of a rank: the part that it updates, and the units that its operations read.

mod gathered;
mod quantized;
mod replicated;
mod rounding;
mod secondary;

pub(crate) use gathered::GatheredUnits;
pub(crate) use quantized::slot_bytes;
pub(crate) use replicated::ReplicatedParameters;
pub(crate) use rounding::{RoundingRun, round_part};

use crate::error::Result;
use crate::layout::RankGrid;
use crate::memory::WaitTracker;
use crate::step::ExecutorOptions;
use rounding::RoundingRuns;
use std::ops::Range;
use std::sync::Arc;
use trireme_base::DType;
use trireme_schedule::{ProgramHeader, StateClass};
use trireme_tensor::{
    Category, Device, ParameterInfo, ParameterSource, ParameterTable, Parameters, Shape, Tensor, View,
    ViewMut,
};

/// The parameters of a rank.
///
/// Operations read full units: at any time, or while they are gathered if parameters are sharded. The rank updates its part, in f32 or
/// [bf16](ExecutorOptions::bf16_parameters).
#[derive(Debug)]
pub(crate) struct RankParameters {
    table: Arc<ParameterTable>,
    /// For each unit, the elements that this rank updates, without padding.
    parts: Vec<Range<usize>>,
    /// The elements that this rank updates; `None` if these are within the gathered units.
    shards: Option<Parameters>,
    /// The units that operations read; `None` if operations read `shards`, because this rank updates full units.
    full_units: Option<GatheredUnits>,
    /// A copy of the tied unit that another pipeline rank updates and a unit of this rank reads, with the unit's index. The copy has the
    /// dtype in which operations read units.
    tied_copy: Option<(usize, Tensor)>,
    /// The runs by which updates are rounded; `None` if parameters are in f32.
    rounding_runs: Option<RoundingRuns>,
    device: Device,
}

impl RankParameters {
    /// Allocates parameters with zeros. This rank updates `parts`. A rank that has all parameters and does not train allocates nothing:
    /// [`set_all`](RankParameters::set_all) provides its parameters. Parameters are gathered in the precision of `options`. The methods
    /// of ZeRO++ apply if `ranks` are split by host. Shards that are separate from full units are on `shards_device`.
    pub(crate) fn new(
        table: &Arc<ParameterTable>,
        parts: Vec<Range<usize>>,
        header: &ProgramHeader,
        options: &ExecutorOptions,
        ranks: &RankGrid,
        device: &Device,
        shards_device: &Device,
    ) -> Result<Self> {
        let (gathered_dtype, dtype) = (options.gather_precision().dtype(), options.parameter_dtype());
        let state = &header.state;
        let is_kept = !state.is_sharded(StateClass::Parameters);
        // With a single shard, the shard is the full unit.
        let updates_full_units = is_kept && ranks.state.dense.update_group(header).world_size() == 1;
        let gathered =
            || GatheredUnits::new(table, header, options.zero_plus_plus, ranks, device, gathered_dtype);
        let full_units = (!updates_full_units).then(gathered).transpose()?;
        let shards = if updates_full_units {
            // A rank that does not train takes over existing parameters.
            let zeros = || Parameters::zeros_of(table, parts.clone(), dtype, device, Category::Parameters);
            state.is_trained().then(zeros).transpose()?
        } else if is_kept && gathered_dtype == dtype {
            None
        } else {
            // Next to copies in 16 bits, the f32 weights count as optimizer state (master weights), as in the ZeRO paper.
            let is_master = gathered_dtype != dtype;
            let category = if is_master { Category::Optimizer } else { Category::Parameters };
            let moves = state.is_fetched(state.class_of_weights());
            let make = if moves { Parameters::without_memory } else { Parameters::zeros_of };
            Some(make(table, parts.clone(), dtype, shards_device, category)?)
        };
        let is_copied = |(reader, owner): &&(usize, usize)| header.holds(*reader) && !header.holds(*owner);
        let mut copy = None;
        if let Some(&(_, unit)) = header.chain.ties.iter().find(is_copied) {
            let shape = [table.units()[unit].num_elements].into();
            let dtype = if updates_full_units { dtype } else { gathered_dtype };
            copy = Some((unit, device.empty(shape, dtype, Category::Parameters)?));
        }
        let rounding_runs = (dtype == DType::Bf16).then(|| RoundingRuns::new(table, &parts));
        let (table, device) = (Arc::clone(table), device.clone());
        Ok(RankParameters { table, parts, shards, full_units, tied_copy: copy, rounding_runs, device })
    }

    /// Returns the runs by which an update of this rank's part of a unit is rounded; `None` if parameters are in f32. Does not allocate.
    pub(crate) fn rounding_runs(&self, unit: usize) -> Option<Arc<[RoundingRun]>> {
        self.rounding_runs.as_ref().map(|runs| runs.of_unit(unit))
    }

    /// Sets the parameters of a rank that has all of them and does not train.
    pub(crate) fn set_all(&mut self, all: Parameters) {
        assert!(self.full_units.is_none(), "the rank has all parameters");
        self.shards = Some(all);
    }

    /// Returns the copy of the tied unit of another pipeline rank.
    pub(crate) fn tied_copy_mut(&mut self) -> ViewMut<'_> {
        self.tied_copy.as_mut().expect("a unit that lies elsewhere is read here").1.view_mut()
    }

    /// The device of the elements that this rank updates.
    pub(crate) fn shard_device(&self) -> &Device {
        self.shards.as_ref().map_or(&self.device, Parameters::device)
    }

    pub(crate) fn parts(&self) -> &[Range<usize>] {
        &self.parts
    }

    pub(crate) fn shard(&self, unit: usize) -> View<'_> {
        match &self.shards {
            Some(shards) => shards.flat(unit),
            None => self.full_unit(unit).part(self.parts[unit].start, self.shape(unit)),
        }
    }

    /// As [`shard`](RankParameters::shard), to write. Full copies of the unit do not change.
    pub(crate) fn shard_mut(&mut self, unit: usize) -> ViewMut<'_> {
        let (start, shape) = (self.parts[unit].start, self.shape(unit));
        if let Some(shards) = &mut self.shards {
            self.full_units.iter_mut().for_each(|full_units| full_units.invalidate(unit));
            return shards.flat_mut(unit);
        }
        let full_units = self.full_units.as_mut().expect("what is stepped lies within whole units");
        full_units.view_mut(unit).into_part(start, shape)
    }

    /// The memory of this rank's shard of a unit, if it is separate from the unit that operations read.
    pub(crate) fn memory(&mut self, unit: usize) -> Option<&mut Tensor> {
        let shards = self.shards.as_mut().filter(|_| self.full_units.is_some());
        shards.map(|shards| shards.memory_mut(unit))
    }

    fn shape(&self, unit: usize) -> Shape {
        [self.parts[unit].len()].into()
    }

    /// Calls `write` for each parameter of `unit` that has elements which this rank updates, in order: with its description, the range of
    /// these elements, and a slice of zeros, which `write` replaces by their new values.
    pub(crate) fn load<E>(
        &mut self,
        unit: usize,
        mut write: impl FnMut(&ParameterInfo, Range<usize>, &mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let (table, parts) = (Arc::clone(&self.table), self.parts.clone());
        let device = self.shard_device().clone();
        table.stored(&parts).filter(|(info, ..)| info.unit == unit).try_for_each(|(info, held, within)| {
            let values = self.shard_mut(unit).into_part(within.start, [within.len()].into());
            device.fill_f32s(values, |values| write(info, held, values))
        })
    }

    /// Changes the elements of a unit that this rank updates to `part`. Frees the unit's memory and allocates it again, with zeros in the
    /// part; the full unit is allocated if this pipeline rank `holds` it, and has to be gathered before it is read.
    pub(crate) fn set_part(&mut self, unit: usize, part: Range<usize>, holds: bool) -> Result<()> {
        self.parts[unit] = part.clone();
        if let Some(runs) = &mut self.rounding_runs {
            runs.set_part(&self.table, unit, &part);
        }
        if let Some(full_units) = &mut self.full_units {
            full_units.reset_unit(unit, holds)?;
        }
        if let Some(shards) = &mut self.shards {
            shards.set_part(unit, part)?;
        }
        Ok(())
    }

    /// Starts to gather a unit. Collective over the ranks of the shards.
    pub(crate) fn unshard(&mut self, unit: usize) -> Result<()> {
        let shard = self.shards.as_ref().map(|shards| (shards.flat(unit), shards.device()));
        self.full_units.as_mut().map_or(Ok(()), |full_units| full_units.unshard(unit, shard))
    }

    pub(crate) fn reshard(&mut self, unit: usize) {
        self.full_units.as_mut().expect("only gathered units are freed").reshard(unit);
    }

    pub(crate) fn await_gathered_unit(&mut self, unit: usize, waiting: &mut WaitTracker) -> Result<()> {
        self.full_units.as_mut().map_or(Ok(()), |full_units| full_units.await_unit(unit, waiting))
    }

    /// Invalidates the secondary shards of all units after parameters were loaded. All ranks must call it, including a rank that has loaded
    /// nothing of a unit.
    pub(crate) fn invalidate(&mut self) {
        if let Some(full_units) = &mut self.full_units {
            (0..self.parts.len()).for_each(|unit| full_units.invalidate(unit));
        }
    }

    /// Whether full copies of units stay allocated next to the shards.
    pub(crate) fn keeps_full_units(&self) -> bool {
        self.full_units.as_ref().is_some_and(|full_units| full_units.is_kept)
    }

    fn full_unit(&self, unit: usize) -> View<'_> {
        self.full_units.as_ref().expect("what is stepped lies within whole units").view(unit)
    }
}

impl ParameterSource for RankParameters {
    fn unit(&self, unit: usize) -> View<'_> {
        match (&self.tied_copy, &self.full_units, &self.shards) {
            (Some((copied, values)), ..) if *copied == unit => values.view(),
            (_, None, Some(shards)) => shards.unit(unit),
            _ => self.full_unit(unit),
        }
    }
}
