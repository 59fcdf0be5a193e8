//! Parameters of a rank: what it steps, and what its operations read.

pub(crate) mod wholes;

use crate::error::ParallelError;
use crate::ranks::RankGrid;
use crate::step::ZeroPlusPlus;
use crate::stored::Stored;
use crate::waiting::Waiting;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use trireme_base::{Bf16, F16};
use trireme_comm::{Buffer, Group};
use trireme_schedule::{Outline, StateClass};
use trireme_tensor::{
    Category, Device, ParameterInfo, ParameterSource, ParameterTable, Parameters, Precision, Shape, Tensor,
    View, ViewMut,
};
use wholes::{Gathered, Wholes};

/// The parameters of a rank.
///
/// Operations read whole units at any time, or, if parameters are sharded, those that are gathered. What the rank updates is its part,
/// in f32.
#[derive(Debug)]
pub(crate) struct RankParameters {
    table: Arc<ParameterTable>,
    /// What this rank updates of each unit, without what fills up leaves.
    parts: Vec<Range<usize>>,
    layout: Layout,
    /// A unit of another rank of the pipeline that a unit here reads, in f32.
    copy: Option<UnitCopy>,
}

/// The parameters of a unit that lies elsewhere.
struct UnitCopy {
    unit: usize,
    values: Buffer<f32>,
}

/// Where shards lie that are apart from what operations read.
#[derive(Debug)]
pub(crate) struct ShardMemory {
    pub(crate) device: Device,
    /// Whether they have memory all the time.
    pub(crate) is_at_hand: bool,
}

#[derive(Debug)]
enum Layout {
    /// What is read is what is stepped.
    Replicated(Parameters),
    /// What is stepped lies within what is read: shards of whole units in f32 that are there at any time.
    Within(Box<Gathered<f32>>),
    /// Operations read copies.
    Apart { shards: Parameters, wholes: Box<dyn Wholes> },
}

impl RankParameters {
    /// Zeros, of which this rank updates `parts`. Gathered parameters are in `precision`, and `spared` counts where `ranks` are split by hosts; shards apart from them lie on a device of their own.
    pub(crate) fn new(
        (table, parts): (&Arc<ParameterTable>, Vec<Range<usize>>),
        outline: &Outline,
        (precision, spared): (Precision, ZeroPlusPlus),
        ranks: &RankGrid,
        device: &Device,
        shards: &ShardMemory,
    ) -> Result<Self, ParallelError> {
        let group = ranks.shards();
        let is_kept = !outline.state.is_sharded(StateClass::Parameters);
        // One shard is the whole.
        let is_whole = is_kept && ranks.updating(outline).world_size() == 1;
        let layout = match precision {
            _ if is_whole => {
                Layout::Replicated(Parameters::zeros_of(table, parts.clone(), device, Category::Parameters)?)
            }
            Precision::F32 if is_kept => {
                Layout::Within(Box::new(Gathered::new(table, outline, group, device)?))
            }
            _ => {
                // Beside narrow copies that stay, what is stepped is state of the optimizer, as the ZeRO paper counts.
                let is_master = precision != Precision::F32;
                let category = if is_master { Category::Optimizer } else { Category::Parameters };
                let wholes: Box<dyn Wholes> = match precision {
                    Precision::F32 => {
                        Box::new(Gathered::<f32>::new(table, outline, group, device)?.sparing(spared, ranks)?)
                    }
                    Precision::Bf16 => Box::new(
                        Gathered::<Bf16>::new(table, outline, group, device)?.sparing(spared, ranks)?,
                    ),
                    Precision::F16 => {
                        Box::new(Gathered::<F16>::new(table, outline, group, device)?.sparing(spared, ranks)?)
                    }
                };
                let make = if shards.is_at_hand { Parameters::zeros_of } else { Parameters::without_memory };
                Layout::Apart { shards: make(table, parts.clone(), &shards.device, category)?, wholes }
            }
        };
        Ok(RankParameters { table: Arc::clone(table), parts, layout, copy: None })
    }

    /// Takes memory for a unit that lies elsewhere and is read here.
    pub(crate) fn with_copy(
        mut self,
        unit: usize,
        group: &Group,
        device: &Device,
    ) -> Result<Self, ParallelError> {
        let len = self.table.units()[unit].num_elements;
        device.memory().take(Category::Parameters, len * size_of::<f32>())?;
        self.copy = Some(UnitCopy { unit, values: group.buffer(len)? });
        Ok(self)
    }

    /// Writes the unit that lies elsewhere.
    pub(crate) fn copy_mut(&mut self) -> &mut [f32] {
        &mut self.copy.as_mut().expect("a unit that lies elsewhere is read here").values
    }

    /// The elements of each unit's flat buffer that this rank steps.
    pub(crate) fn parts(&self) -> &[Range<usize>] {
        &self.parts
    }

    /// What this rank steps of a unit, in f32.
    pub(crate) fn shard(&self, unit: usize) -> View<'_> {
        match &self.layout {
            Layout::Replicated(parameters) => parameters.flat(unit),
            Layout::Within(wholes) => wholes.view(unit).part(self.parts[unit].start, self.shape(unit)),
            Layout::Apart { shards, .. } => shards.flat(unit),
        }
    }

    /// As [`shard`](RankParameters::shard), to write; whole copies are as they were.
    pub(crate) fn shard_mut(&mut self, unit: usize) -> ViewMut<'_> {
        let shape = self.shape(unit);
        match &mut self.layout {
            Layout::Replicated(parameters) => parameters.flat_mut(unit),
            Layout::Within(wholes) => wholes.view_mut(unit).into_part(self.parts[unit].start, shape),
            Layout::Apart { shards, wholes } => {
                wholes.forget(unit);
                shards.flat_mut(unit)
            }
        }
    }

    /// The memory of what this rank steps of a unit, if it is apart from what operations read.
    pub(crate) fn memory(&mut self, unit: usize) -> Option<&mut Tensor> {
        match &mut self.layout {
            Layout::Apart { shards, .. } => Some(shards.memory_mut(unit)),
            _ => None,
        }
    }

    fn shape(&self, unit: usize) -> Shape {
        [self.parts[unit].len()].into()
    }

    /// Calls `write` with the description of each parameter of a unit of which this rank steps something, which of its
    /// elements that is, and the elements, in order.
    pub(crate) fn for_each_mut<E>(
        &mut self,
        unit: usize,
        mut write: impl FnMut(&ParameterInfo, Range<usize>, &mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let (table, parts) = (Arc::clone(&self.table), self.parts.clone());
        for (info, held, within) in table.held(&parts).filter(|(info, ..)| info.unit == unit) {
            write(info, held, &mut self.shard_mut(unit).f32s()[within])?;
        }
        Ok(())
    }

    /// Steps `part` of a unit from now on, and reads all of it if this rank of the pipeline `holds` it; what was here of it is given
    /// back. It is zeros then, also the whole until it is gathered.
    pub(crate) fn set_part(
        &mut self,
        unit: usize,
        part: Range<usize>,
        holds: bool,
    ) -> Result<(), ParallelError> {
        self.parts[unit] = part.clone();
        match &mut self.layout {
            Layout::Replicated(parameters) => parameters.set_part(unit, part)?,
            Layout::Within(wholes) => wholes.hold(unit, holds)?,
            Layout::Apart { shards, wholes } => {
                wholes.hold(unit, holds)?;
                shards.set_part(unit, part)?;
            }
        }
        Ok(())
    }

    /// Starts to gather a unit. Collective over the shards.
    pub(crate) fn unshard(&mut self, unit: usize) -> Result<(), ParallelError> {
        match &mut self.layout {
            Layout::Replicated(_) => Ok(()),
            Layout::Within(wholes) => wholes.unshard(unit, None),
            Layout::Apart { shards, wholes } => wholes.unshard(unit, Some(shards.flat(unit))),
        }
    }

    /// Gives back what was gathered of a unit.
    pub(crate) fn reshard(&mut self, unit: usize) {
        self.wholes_mut().expect("only what was gathered is given back").reshard(unit);
    }

    /// Waits until a unit can be read.
    pub(crate) fn ensure(&mut self, unit: usize, waiting: &mut Waiting) -> Result<(), ParallelError> {
        self.wholes_mut().map_or(Ok(()), |wholes| wholes.ensure(unit, waiting))
    }

    /// Drops copies that are out of date once shards are loaded, on all ranks alike: one may have written nothing of a unit.
    pub(crate) fn forget(&mut self) {
        let num_units = self.parts.len();
        self.wholes_mut().into_iter().for_each(|wholes| (0..num_units).for_each(|unit| wholes.forget(unit)));
    }

    /// Whether there are whole copies that stay, beside the shards.
    pub(crate) fn are_wholes_kept(&mut self) -> bool {
        self.wholes_mut().is_some_and(|wholes| wholes.are_kept())
    }

    fn wholes_mut(&mut self) -> Option<&mut dyn Wholes> {
        match &mut self.layout {
            Layout::Replicated(_) => None,
            Layout::Within(wholes) => Some(&mut **wholes),
            Layout::Apart { wholes, .. } => Some(&mut **wholes),
        }
    }
}

impl ParameterSource for RankParameters {
    fn unit(&self, unit: usize) -> View<'_> {
        if let Some(copy) = self.copy.as_ref().filter(|copy| copy.unit == unit) {
            return f32::view(&copy.values);
        }
        match &self.layout {
            Layout::Replicated(parameters) => parameters.unit(unit),
            Layout::Within(wholes) => wholes.view(unit),
            Layout::Apart { wholes, .. } => wholes.view(unit),
        }
    }
}

impl fmt::Debug for UnitCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UnitCopy({})", self.unit)
    }
}
