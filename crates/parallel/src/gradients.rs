//! Gradients of every unit: accumulated over microbatches, reduced over ranks.

mod memory;

use crate::counted::Counted;
use crate::error::ParallelError;
use crate::offload::Movable;
use crate::pool::Pool;
use crate::ranks::RankGrid;
use crate::reduction::{Exchanges, Reduced, Reduction};
use crate::shard_sum::ShardSum;
use crate::tied::TiedGradients;
use crate::tree::TreeSum;
use crate::waiting::Waiting;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use trireme_base::DType;
use trireme_comm::{Buffer, CompressionStatistics, Compressor, Round, Work};
use trireme_schedule::Outline;
use trireme_tensor::{
    Category, Device, DeviceError, GradSink, GradTarget, ParameterSpan, ParameterTable, Shape, Tensor, View,
    ViewMut,
};

/// Whole gradients of one length that are under way at a time, where ranks keep shards of them only: one is written or rounded
/// while another one is reduced.
const IN_FLIGHT_MAX: usize = 2;

/// What decides the order of sums over the batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Determinism {
    /// The global microbatch index: the same bits for any layout.
    Layout,
    /// The order in which gradients arrive: the same bits for the same layout, and no partial sums.
    Run,
}

/// A gradient of one unit or shard, of one microbatch or the sum of several.
#[derive(Debug)]
pub(crate) enum Gradient {
    /// In the memory that groups reduce.
    Reducible(Buffer<f32>),
    /// A partial sum beside it.
    Partial(Tensor),
}

impl Gradient {
    fn view(&self, shape: Shape) -> View<'_> {
        match self {
            Gradient::Reducible(buffer) => View::from_f32s(&buffer[..shape.num_elements()], shape),
            Gradient::Partial(tensor) => tensor.view(),
        }
    }

    pub(crate) fn view_mut(&mut self, shape: Shape) -> ViewMut<'_> {
        match self {
            Gradient::Reducible(buffer) => ViewMut::from_f32s(&mut buffer[..shape.num_elements()], shape),
            Gradient::Partial(tensor) => tensor.view_mut(),
        }
    }
}

/// `left += right`.
pub(crate) fn add(device: &Device, shape: Shape, left: &mut Gradient, right: Gradient) {
    device.add_assign(left.view_mut(shape), right.view(shape));
}

/// The gradient of one unit on its way to the optimizer.
struct UnitGradient {
    shape: Shape,
    /// Elements of the memory that groups reduce.
    len: usize,
    /// The elements that this rank steps.
    own: Range<usize>,
    /// Present while it is neither being written nor summed nor reduced. Where it does not stay, it comes from the pool and
    /// goes back there.
    reducible: Option<Buffer<f32>>,
    /// Being written by backward.
    open: Option<Gradient>,
    sum: TreeSum<Gradient>,
    reduction: Reduction,
    /// Its result, between the end of a step and the next one, where no shard is kept apart.
    reduced: Option<Reduced>,
    /// Whether the sum over replicas has ended, of all that was added.
    is_finished: bool,
    /// The sum so far, where ranks keep a shard apart from the whole gradient.
    shard: Option<Box<dyn ShardSum>>,
    /// All of the reduced gradient, gathered from the shards.
    gathered: Option<Gathered>,
}

/// A reduced gradient that comes together.
enum Gathered {
    UnderWay(Work<Buffer<f32>>),
    Whole(Buffer<f32>),
}

/// Gradients of all units of a rank.
pub(crate) struct Gradients {
    device: Device,
    determinism: Determinism,
    outline: Outline,
    table: Arc<ParameterTable>,
    ranks: Arc<RankGrid>,
    units: Vec<UnitGradient>,
    /// Whole gradients in f32, where something else is kept.
    pool: Option<Pool<f32>>,
    /// What has counted whole gradients that stay.
    staying: Option<Pool<f32>>,
    /// Whether those are under way until they are reduced.
    is_pool_under_way: bool,
    /// Whether what is under way is rounded, and goes when it was added to a shard.
    is_narrow_pooled: bool,
    /// Units whose reductions are under way, the first one first.
    under_way: VecDeque<usize>,
    exchanges: Exchanges,
    /// What reductions take beside gradients.
    counted: Counted,
    /// What tied units of a pipeline have for each other.
    tied: Option<TiedGradients>,
    /// For each parameter: the open gradient of its unit holds a part of it.
    written: Vec<bool>,
    waiting: Waiting,
}

impl Gradients {
    /// Lets what a tied unit has for another one's gradient wait for it.
    pub(crate) fn with_tied(self, tied: Option<TiedGradients>) -> Self {
        Gradients { tied, ..self }
    }

    /// Makes room for the gradients that backward of `unit` writes. What a unit that is tied to it has for the microbatch, is there.
    pub(crate) fn prepare(&mut self, unit: usize, microbatch: usize) -> Result<(), ParallelError> {
        if self.pool.is_some() {
            let outline = std::mem::take(&mut self.outline);
            let prepared = outline.writes(unit).try_for_each(|unit| self.take_whole(unit));
            self.outline = outline;
            prepared?;
        }
        let Some(tied) = &mut self.tied else { return Ok(()) };
        tied.begin(unit, microbatch)?;
        let Some(part) = tied.take(unit, microbatch) else { return Ok(()) };
        let span = tied.span();
        let device = self.device.clone();
        let GradTarget { view, accumulate } = self.target(&span)?;
        let values = View::from_f32s(&part, span.shape);
        if accumulate {
            device.add_assign(view, values)
        } else {
            device.copy(values, view)
        }
        self.grad_ready(&span);
        self.tied.as_ref().expect("it was there").give(part);
        Ok(())
    }

    /// What tied units of a pipeline have for each other.
    pub(crate) fn tied(&mut self) -> Option<&mut TiedGradients> {
        self.tied.as_mut()
    }

    /// Takes memory for a whole gradient, and waits for some to come back rather than take ever more.
    fn take_whole(&mut self, unit: usize) -> Result<(), ParallelError> {
        let state = &self.units[unit];
        // Later terms of a sum are partial sums beside the first.
        if state.reducible.is_some() || state.open.is_some() || !state.sum.is_empty() {
            return Ok(());
        }
        let len = state.len;
        loop {
            let pool = self.pool.as_ref().expect("whole gradients come from a pool");
            let must_wait = self.under_way.contains(&unit) || (self.is_pool_under_way && self.is_full(len));
            if let Some(buffer) = (!must_wait).then(|| pool.take(len)).transpose()? {
                self.units[unit].reducible = Some(buffer);
                return Ok(());
            }
            self.finish_first()?;
        }
    }

    /// Whether as many whole gradients of `len` elements are under way as may be.
    fn is_full(&self, len: usize) -> bool {
        self.under_way.iter().filter(|&&unit| self.units[unit].len == len).count() >= IN_FLIGHT_MAX
    }

    /// Ends a microbatch's backward of `unit`: its gradient joins the sum.
    pub(crate) fn close(&mut self, unit: usize) {
        if self.determinism == Determinism::Run {
            return;
        }
        let parameters = self.table.units()[unit].parameters.clone();
        debug_assert!(
            self.written[parameters.clone()].iter().all(|&written| written),
            "every gradient was written"
        );
        self.written[parameters].fill(false);
        let (device, state) = (&self.device, &mut self.units[unit]);
        let gradient = state.open.take().expect("backward of a unit writes its gradient");
        state.sum.push(gradient, |left, right| add(device, state.shape, left, right));
    }

    /// This rank's sum of `unit`'s gradient since the last reduction, to be changed before the next one.
    pub(crate) fn own_sum(&mut self, unit: usize) -> ViewMut<'_> {
        let (device, state) = (&self.device, &mut self.units[unit]);
        if let Some(sum) = state.sum.finish(|left, right| add(device, state.shape, left, right)) {
            state.open = Some(sum);
        }
        state.open.as_mut().expect("a gradient is summed after backward").view_mut(state.shape)
    }

    /// Starts the reduction over the ranks of what was added to `unit`'s gradient since the last one, when memory for it has
    /// come back rather than be more and more. With `is_whole` it is sent as it is, whatever the compression.
    pub(crate) fn reduce(&mut self, unit: usize, is_whole: bool) -> Result<(), ParallelError> {
        while self.is_narrow_pooled && self.is_full(self.units[unit].len) {
            self.finish_first()?;
        }
        self.written[self.table.units()[unit].parameters.clone()].fill(false);
        let (device, state) = (&self.device, &mut self.units[unit]);
        let sum = state.sum.finish(|left, right| add(device, state.shape, left, right));
        let sum = sum.or(state.open.take()).expect("a gradient is reduced after backward");
        let Gradient::Reducible(buffer) = sum else {
            unreachable!("the first gradient lies in the group's memory, and sums grow to the left")
        };
        if let Some(rounded) = state.reduced.take() {
            state.reduction.give(rounded);
        }
        let group = self.ranks.replicas();
        if let (true, Reduction::Compressed(compressed)) = (is_whole, &mut state.reduction) {
            compressed.start_whole(buffer, group);
        } else if let Some(whole) = state.reduction.start(buffer, device, group)? {
            self.pool.as_ref().expect("what is rounded came from the pool").give(whole);
        }
        self.under_way.push_back(unit);
        if self.outline.held().all(|unit| self.units[unit].reduction.is_under_way()) {
            self.exchanges.flush();
        }
        Ok(())
    }

    /// Waits for the message under way of the reduction that was started first.
    fn finish_first(&mut self) -> Result<(), ParallelError> {
        let unit = self.under_way.pop_front().expect("something is under way");
        let state = &mut self.units[unit];
        let group = self.ranks.replicas();
        let Some(sum) = state.reduction.advance(group, &mut self.waiting)? else {
            // A second message of one unit travels while the first ones of others are waited for.
            self.under_way.push_back(unit);
            return Ok(());
        };
        if let Some(shard) = &mut state.shard {
            shard.add(sum.view(state.own.clone()), &self.device)?;
            state.is_finished = false;
        }
        match (sum, &self.pool) {
            (Reduced::F32(whole), Some(pool)) if state.shard.is_some() => pool.give(whole),
            (Reduced::F32(whole), _) => state.reducible = Some(whole),
            (rounded, _) if state.shard.is_some() => state.reduction.give(rounded),
            (rounded, _) => state.reduced = Some(rounded),
        }
        Ok(())
    }

    /// Waits for every reduction; how long this rank has waited for gradients in this step.
    pub(crate) fn wait(&mut self) -> Result<Waiting, ParallelError> {
        while !self.under_way.is_empty() {
            self.finish_first()?;
        }
        // Backward started with the last unit.
        let pending = |state: &&mut UnitGradient| !state.is_finished;
        let shards = self.units.iter_mut().rev().filter(pending).filter_map(|state| state.shard.as_mut());
        shards.for_each(|shard| shard.reduce(&self.device));
        let mut shards = self.units.iter_mut().rev().filter(pending).filter_map(|state| state.shard.as_mut());
        shards.try_for_each(|shard| shard.wait(&mut self.waiting))?;
        self.units.iter_mut().for_each(|state| state.is_finished = true);
        Ok(std::mem::take(&mut self.waiting))
    }

    /// Waits for the sum of one unit ahead of the others.
    pub(crate) fn finish(&mut self, unit: usize) -> Result<(), ParallelError> {
        while self.under_way.contains(&unit) {
            self.finish_first()?;
        }
        let state = &mut self.units[unit];
        if let Some(shard) = state.shard.as_mut().filter(|_| !state.is_finished) {
            shard.reduce(&self.device);
            shard.wait(&mut self.waiting)?;
            state.is_finished = true;
        }
        Ok(())
    }

    /// Starts to gather a unit's reduced gradient from the shards.
    pub(crate) fn gather(&mut self, unit: usize) -> Result<(), ParallelError> {
        self.finish(unit)?;
        let state = &self.units[unit];
        let pool = self.pool.as_ref().expect("beside shards, whole gradients come from a pool");
        let mut buffer = pool.take(state.len)?;
        let own = ViewMut::from_f32s(&mut buffer[state.own.clone()], [state.own.len()].into());
        self.device.convert(self.reduced(unit), own);
        self.units[unit].gathered = Some(Gathered::UnderWay(self.ranks.shards().all_gather(buffer)));
        Ok(())
    }

    /// Waits for a gradient that was to be gathered.
    pub(crate) fn await_gathered(&mut self, unit: usize, waiting: &mut Waiting) -> Result<(), ParallelError> {
        let gathered = &mut self.units[unit].gathered;
        if let Some(Gathered::UnderWay(work)) = gathered.take() {
            *gathered = Some(Gathered::Whole(waiting.wait(work)?));
        }
        Ok(())
    }

    /// Gives the memory of a gathered gradient back, which has been waited for.
    pub(crate) fn free_gathered(&mut self, unit: usize) {
        if let (Some(Gathered::Whole(buffer)), Some(pool)) = (self.units[unit].gathered.take(), &self.pool) {
            pool.give(buffer);
        }
    }

    /// What this rank updates a unit by: the gathered gradient, or its part.
    pub(crate) fn for_update(&self, unit: usize) -> View<'_> {
        let state = &self.units[unit];
        match &state.gathered {
            Some(Gathered::Whole(buffer)) => {
                View::from_f32s(&buffer[..state.shape.num_elements()], state.shape)
            }
            _ => self.reduced(unit),
        }
    }

    /// The memory of a unit's shard.
    ///
    /// # Panics
    /// If no shard is kept apart.
    pub(crate) fn memory(&mut self, unit: usize) -> &mut dyn Movable {
        self.units[unit].shard.as_mut().expect("what is offloaded is kept apart").memory()
    }

    /// Whether `unit`'s reduction is compressed.
    pub(crate) fn is_compressed(&self, unit: usize) -> bool {
        matches!(self.units[unit].reduction, Reduction::Compressed(_))
    }

    /// Takes memory so that a compressed step may be sent whole, and, if it `may_be_skipped`, taken back.
    pub(crate) fn expect_momentum(&mut self, may_be_skipped: bool) -> Result<(), ParallelError> {
        let group = self.ranks.replicas();
        for state in &mut self.units {
            let Reduction::Compressed(compressed) = &mut state.reduction else { continue };
            let num_bytes = state.len * size_of::<f32>();
            self.device.memory().take_mapped(Category::Communication, group.peer_bytes_mapped(num_bytes))?;
            if may_be_skipped {
                compressed.remember(&self.device)?;
            }
        }
        Ok(())
    }

    /// Takes back what the last step, which was compressed, did to the compressors.
    pub(crate) fn take_back_compression(&mut self) -> Result<(), ParallelError> {
        self.units.iter_mut().try_for_each(|state| match &mut state.reduction {
            Reduction::Compressed(compressed) => compressed.take_back(),
            _ => Ok(()),
        })
    }

    /// Kinds of steps that compressors of a dry group have not gone through.
    pub(crate) fn num_kinds(&self) -> usize {
        let kinds = self.units.iter().map(|state| match &state.reduction {
            Reduction::Compressed(compressed) => compressed.num_kinds(),
            _ => 0,
        });
        kinds.max().unwrap_or(0)
    }

    /// The compressors, each with its unit's name.
    pub(crate) fn compressors(&self) -> impl Iterator<Item = (&str, &Compressor)> {
        let names = self.table.units().iter().map(|unit| unit.name.as_str());
        names.zip(&self.units).filter_map(|(name, state)| match &state.reduction {
            Reduction::Compressed(compressed) => Some((name, compressed.compressor()?)),
            _ => None,
        })
    }

    /// The same, to load.
    pub(crate) fn compressors_mut(&mut self) -> impl Iterator<Item = (&str, &mut Compressor)> {
        let names = self.table.units().iter().map(|unit| unit.name.as_str());
        names.zip(&mut self.units).filter_map(|(name, state)| match &mut state.reduction {
            Reduction::Compressed(compressed) => Some((name, compressed.compressor_mut()?)),
            _ => None,
        })
    }

    /// What compression did to all units in the last step, in the units of this rank's sums.
    pub(crate) fn compression_statistics(&self) -> CompressionStatistics {
        let world_size = self.ranks.data().world_size();
        let mut all = CompressionStatistics::default();
        let mut squares = 0.0;
        for state in &self.units {
            let of_unit = match &state.reduction {
                Reduction::Compressed(compressed) => compressed.statistics(),
                _ => {
                    let round = Round::AllReduce { dtype: DType::F32, len: state.shape.num_elements() };
                    let bytes = round.bytes_sent(world_size);
                    CompressionStatistics { error_norm: 0.0, bytes_sent: bytes, bytes_uncompressed: bytes }
                }
            };
            all.bytes_sent += of_unit.bytes_sent;
            all.bytes_uncompressed += of_unit.bytes_uncompressed;
            squares += f64::from(of_unit.error_norm).powi(2);
        }
        all.error_norm = squares.sqrt() as f32;
        all
    }

    /// This rank's shard of the reduced gradient of `unit`: the sum over all microbatches of all ranks, in what it was
    /// reduced in.
    pub(crate) fn reduced(&self, unit: usize) -> View<'_> {
        let state = &self.units[unit];
        let own = &state.own;
        match (&state.shard, &state.reduced, &state.reducible) {
            (Some(shard), _, _) => shard.view(),
            (None, Some(rounded), _) => rounded.view(own.clone()),
            (None, None, Some(whole)) => View::from_f32s(&whole[own.clone()], [own.len()].into()),
            (None, None, None) => unreachable!("a gradient is read after its reduction"),
        }
    }
}

impl UnitGradient {
    /// Opens a gradient to be written: the group's memory first, partial sums after.
    fn open(&mut self, device: &Device) -> Result<(), DeviceError> {
        if self.open.is_none() {
            self.open = Some(match self.reducible.take() {
                Some(buffer) => Gradient::Reducible(buffer),
                None => Gradient::Partial(device.empty(self.shape, DType::F32, Category::Gradients)?),
            });
        }
        Ok(())
    }
}

impl GradSink for Gradients {
    fn target(&mut self, span: &ParameterSpan) -> Result<GradTarget<'_>, DeviceError> {
        if let Some(open) = self.tied.as_mut().and_then(|tied| tied.target(span)) {
            return Ok(open);
        }
        let accumulate = self.written[span.first.0];
        let state = &mut self.units[span.unit];
        state.open(&self.device)?;
        let gradient = state.open.as_mut().expect("it was opened in the line above");
        let view = gradient.view_mut(state.shape).into_part(span.offset, span.shape);
        Ok(GradTarget { view, accumulate })
    }

    fn grad_ready(&mut self, span: &ParameterSpan) {
        if self.tied.as_mut().is_some_and(|tied| tied.end(span)) {
            return;
        }
        self.written[span.first.0..span.first.0 + span.num_parameters].fill(true);
    }
}
