//! The gradients of all units: accumulated over microbatches, reduced over ranks.

mod compressed;
mod construction;
mod hierarchical;
mod layout;
mod norm;
mod reduced_vector;
mod reduction;
mod shard_sum;
mod tied;
mod tree;

pub(crate) use norm::SquaredNorms;
pub(crate) use tree::TreeSum;

use crate::error::Result;
use crate::layout::RankGrid;
use crate::memory::{CountedMemory, ExchangeVector, Pool, WaitTracker};
use crate::offload::Movable;
use crate::parameters::{GatheredUnits, ReplicatedParameters};
use crate::step::Determinism;
use compressed::CompressedReduction;
use layout::GradientLayout;
use reduction::Reduction;
use shard_sum::ShardSum;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use tied::TiedGradients;
use trireme_base::DType;
use trireme_codec::{CompressionStatistics, Compressor};
use trireme_schedule::ProgramHeader;
use trireme_tensor::{
    Category, Device, DeviceError, GradSink, GradTarget, ParameterSpan, ParameterTable, Tensor, View, ViewMut,
};

/// Maximum number of full gradients of one length in flight, if these do not stay allocated: one is being written or rounded while another
/// one is being reduced.
const IN_FLIGHT_MAX: usize = 2;

/// A gradient of one unit or shard, for one microbatch or summed over several.
pub(crate) enum Gradient {
    /// A vector that ranks can reduce in place.
    Reducible(ExchangeVector),
    /// A partial sum in memory of its own, which is added to the reducible vector.
    Partial(Tensor),
}

impl Gradient {
    fn view(&self, len: usize) -> View<'_> {
        match self {
            Gradient::Reducible(vector) => vector.part(0..len),
            Gradient::Partial(tensor) => tensor.view(),
        }
    }

    /// Returns the first `len` elements, without padding.
    pub(crate) fn view_mut(&mut self, len: usize) -> ViewMut<'_> {
        match self {
            Gradient::Reducible(vector) => vector.part_mut(0..len),
            Gradient::Partial(tensor) => tensor.view_mut(),
        }
    }
}

/// `left += right`.
pub(crate) fn add(device: &Device, len: usize, left: &mut Gradient, right: Gradient) {
    device.add_assign(left.view_mut(len), right.view(len));
}

/// The gradient of one unit, from backward to its update.
struct UnitGradient {
    num_elements: usize,
    /// Length of the vector that ranks reduce, with padding if it is reduce-scattered.
    len: usize,
    /// The elements that belong to this rank's shard.
    own: Range<usize>,
    /// The vector that ranks reduce. `None` while it is written, summed or reduced. A unit that does not keep its vector takes it from the
    /// pool.
    reducible: Option<ExchangeVector>,
    open: Option<Gradient>,
    sum: TreeSum<Gradient>,
    reduction: Reduction,
    /// Whether `shard` contains the sum over replicas of everything that was added to it.
    is_finished: bool,
    /// The accumulated shard, if it is stored separately from the full gradient.
    shard: Option<ShardSum>,
}

pub(crate) struct Gradients {
    device: Device,
    determinism: Determinism,
    layout: GradientLayout,
    header: ProgramHeader,
    table: Arc<ParameterTable>,
    ranks: Arc<RankGrid>,
    units: Vec<UnitGradient>,
    shards_device: Device,
    /// Memory for full gradients in f32.
    pool: Pool,
    /// Units with a reduction in flight, in the order in which their next messages are awaited.
    in_flight: VecDeque<usize>,
    /// Reduced gradients, gathered from their shards; only if gradients are sharded but each rank updates full units.
    gathered: Option<GatheredUnits>,
    /// Counts the memory that reductions use in addition to the gradients.
    counted: CountedMemory,
    /// Replicated parameters whose sums could differ between ranks, because their rounding depends on neighboring elements.
    block_rounded: ReplicatedParameters,
    /// Contributions to the gradients of tied parameters, in a pipeline.
    tied: Option<TiedGradients>,
    /// For each parameter, whether the gradient that is being accumulated (`open`) already has a contribution, so that the next one is
    /// added.
    written: Vec<bool>,
    waiting: WaitTracker,
}

impl Gradients {
    /// Allocates memory for the gradients that backward of `unit` writes. If a tied unit has a contribution for the microbatch, it is added
    /// here.
    pub(crate) fn prepare(&mut self, unit: usize, microbatch: usize) -> Result<()> {
        if !self.layout.keeps_full() {
            let header = std::mem::take(&mut self.header);
            let prepared = header.writes(unit).try_for_each(|unit| self.take_full_gradient(unit));
            self.header = header;
            prepared?;
        }
        let Some(tied) = &mut self.tied else { return Ok(()) };
        tied.begin(unit, microbatch)?;
        let Some(part) = tied.take(unit, microbatch) else { return Ok(()) };
        let span = tied.span;
        let device = self.device.clone();
        let GradTarget { view, accumulate } = self.target(&span)?;
        let values = part.view().part(0, span.shape);
        if accumulate {
            device.add_assign(view, values)
        } else {
            device.copy(values, view)
        }
        self.grad_ready(&span);
        self.tied.as_ref().expect("it was there").pool.release(part);
        Ok(())
    }

    pub(crate) fn tied(&mut self) -> Option<&mut TiedGradients> {
        self.tied.as_mut()
    }

    /// Allocates memory for a full gradient. If too many gradients are in flight, waits until a reduction ends and reuses its memory.
    fn take_full_gradient(&mut self, unit: usize) -> Result<()> {
        let state = &self.units[unit];
        // Later gradients of a sum are partial sums in memory of their own.
        if state.reducible.is_some() || state.open.is_some() || !state.sum.is_empty() {
            return Ok(());
        }
        let len = state.len;
        loop {
            let must_wait =
                self.in_flight.contains(&unit) || (!self.layout.is_rounded() && self.is_at_limit(len));
            if let Some(vector) = (!must_wait).then(|| self.pool.take(len)).transpose()? {
                self.units[unit].reducible = Some(vector);
                return Ok(());
            }
            self.finish_first()?;
        }
    }

    /// Whether the maximum number of full gradients of `len` elements is in flight.
    fn is_at_limit(&self, len: usize) -> bool {
        self.in_flight.iter().filter(|&&unit| self.units[unit].len == len).count() >= IN_FLIGHT_MAX
    }

    /// Ends a microbatch's backward of `unit`, and adds its gradient to the sum.
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
        state.sum.push(gradient, |left, right| add(device, state.num_elements, left, right));
    }

    /// Returns this rank's sum of `unit`'s gradient since the last reduction. The caller may modify the sum before it is reduced.
    pub(crate) fn own_sum(&mut self, unit: usize) -> ViewMut<'_> {
        let (device, state) = (&self.device, &mut self.units[unit]);
        if let Some(sum) = state.sum.finish(|left, right| add(device, state.num_elements, left, right)) {
            state.open = Some(sum);
        }
        state.open.as_mut().expect("a gradient is summed after backward").view_mut(state.num_elements)
    }

    /// Starts to reduce `unit`'s gradient, accumulated since the last reduction, over the ranks. If gradients are rounded and sharded,
    /// waits until fewer than the maximum are in flight. With `is_uncompressed`, the gradient is sent uncompressed.
    pub(crate) fn reduce(&mut self, unit: usize, is_uncompressed: bool) -> Result<()> {
        while self.layout.is_rounded()
            && self.units[unit].shard.is_some()
            && self.is_at_limit(self.units[unit].len)
        {
            self.finish_first()?;
        }
        let vector = self.take_sum(unit);
        let (device, state) = (&self.device, &mut self.units[unit]);
        if let Some(compressed) = state.reduction.compressed_mut().filter(|_| is_uncompressed) {
            compressed.start_uncompressed(vector);
        } else if let Some(whole) = state.reduction.start(vector, device)? {
            // The rounded copy is reduced, so the f32 gradient goes back to the pool.
            self.pool.release(whole);
        }
        self.in_flight.push_back(unit);
        if self.in_flight.len() == self.header.held().count() {
            self.units.iter().for_each(|state| state.reduction.flush());
        }
        Ok(())
    }

    pub(crate) fn discard(&mut self, unit: usize) {
        let vector = self.take_sum(unit);
        if self.layout.keeps_full() {
            self.units[unit].reducible = Some(vector)
        } else {
            self.pool.release(vector)
        }
    }

    fn take_sum(&mut self, unit: usize) -> ExchangeVector {
        self.written[self.table.units()[unit].parameters.clone()].fill(false);
        let (device, state) = (&self.device, &mut self.units[unit]);
        let sum = state.sum.finish(|left, right| add(device, state.num_elements, left, right));
        let sum = sum.or(state.open.take()).expect("a gradient is reduced after backward");
        let Gradient::Reducible(vector) = sum else {
            unreachable!("the first gradient is what ranks reduce, and sums grow to the left")
        };
        vector
    }

    /// Waits for the next message of the first reduction in flight. If the sum is complete, adds it to the shard.
    fn finish_first(&mut self) -> Result<()> {
        let unit = self.in_flight.pop_front().expect("a reduction is in flight");
        let state = &mut self.units[unit];
        if !state.reduction.advance(&mut state.reducible, &self.device, &mut self.waiting)? {
            // The unit has started another message. Other units' messages are awaited first, so that it overlaps with them.
            self.in_flight.push_back(unit);
            return Ok(());
        }
        let needs_broadcast = state.reduction.is_block_rounded() && self.block_rounded.has(unit);
        if let Some(wide) = state.reducible.as_mut().filter(|_| needs_broadcast) {
            let own = state.own.clone();
            let values = wide.part_mut(own.clone());
            self.block_rounded.broadcast_first(unit, values, own, &mut self.waiting)?;
        }
        if let Some(shard) = &mut state.shard {
            let sum = state.reduction.view(&state.reducible);
            shard.add(sum.part(state.own.start, [state.own.len()].into()), &self.device)?;
            state.is_finished = false;
            if let Reduction::Rounded(rounded) = &mut state.reduction {
                rounded.release();
            } else if !self.layout.keeps_full() {
                self.pool.release(state.reducible.take().expect("the sum lies there"));
            }
        }
        Ok(())
    }

    /// Returns the time that this rank has waited for gradients since the previous call, and the operations that its kernels wait for.
    pub(crate) fn take_waiting(&mut self) -> WaitTracker {
        std::mem::take(&mut self.waiting)
    }

    pub(crate) fn wait(&mut self) -> Result<()> {
        while !self.in_flight.is_empty() {
            self.finish_first()?;
        }
        // The shards are reduced in the order of backward, which starts with the last unit.
        let shards = self.units.iter_mut().rev().filter_map(UnitGradient::pending);
        shards.for_each(ShardSum::reduce);
        let mut shards = self.units.iter_mut().rev().filter_map(UnitGradient::pending);
        shards.try_for_each(|shard| shard.vector.wait(&mut self.waiting))?;
        self.units.iter_mut().for_each(|state| state.is_finished = true);
        Ok(())
    }

    /// Waits for the sum of one unit before the others.
    pub(crate) fn finish(&mut self, unit: usize) -> Result<()> {
        while self.in_flight.contains(&unit) {
            self.finish_first()?;
        }
        let state = &mut self.units[unit];
        if let Some(shard) = state.pending() {
            shard.reduce();
            shard.vector.wait(&mut self.waiting)?;
            state.is_finished = true;
        }
        Ok(())
    }

    /// Starts to all-gather a unit's reduced gradient from the shards.
    pub(crate) fn gather(&mut self, unit: usize) -> Result<()> {
        self.finish(unit)?;
        let gathered = self.gathered.as_mut().expect("shards of gradients update whole units");
        gathered.unshard(unit, Some((self.units[unit].reduced(), &self.shards_device)))
    }

    pub(crate) fn await_gathered(&mut self, unit: usize, waiting: &mut WaitTracker) -> Result<()> {
        self.gathered.as_mut().map_or(Ok(()), |gathered| gathered.await_unit(unit, waiting))
    }

    /// Frees the memory of a gathered gradient, whose gather has completed.
    pub(crate) fn free_gathered(&mut self, unit: usize) {
        if let Some(gathered) = &mut self.gathered {
            gathered.reshard(unit);
        }
    }

    /// Frees the memory of a reduced gradient.
    pub(crate) fn free_reduced(&mut self, unit: usize) {
        let state = &mut self.units[unit];
        if let Reduction::Rounded(rounded) = &mut state.reduction {
            rounded.release();
        }
        if let Some(sum) = state.reducible.take() {
            self.pool.release(sum);
        }
        if let Some(shard) = &mut state.shard {
            shard.vector.release();
        }
    }

    /// Returns the gradient with which this rank updates a unit: the gathered gradient, or this rank's shard.
    pub(crate) fn for_update(&self, unit: usize) -> View<'_> {
        match &self.gathered {
            Some(gathered) => gathered.view(unit),
            None => self.reduced(unit),
        }
    }

    /// The memory of a unit's shard, for offloading.
    ///
    /// # Panics
    /// If the shard is not stored separately.
    pub(crate) fn memory(&mut self, unit: usize) -> &mut dyn Movable {
        &mut self.units[unit].shard.as_mut().expect("what is offloaded is kept apart").vector
    }

    pub(crate) fn is_compressed(&self, unit: usize) -> bool {
        self.units[unit].reduction.compressed().is_some()
    }

    /// Counts the memory of peers that this rank maps when a compressed unit sends a gradient uncompressed. If a step `may_be_skipped`,
    /// also allocates memory to roll compressors back.
    pub(crate) fn reserve_for_momentum(&mut self, may_be_skipped: bool) -> Result<()> {
        let group = self.ranks.replicas();
        for state in &mut self.units {
            let Some(compressed) = state.reduction.compressed_mut() else { continue };
            let num_bytes = state.len * size_of::<f32>();
            self.device
                .staging()
                .charge_mapped(Category::Communication, group.peer_bytes_mapped(num_bytes))?;
            if may_be_skipped {
                compressed.enable_rollback()?;
            }
        }
        Ok(())
    }

    pub(crate) fn roll_back_compression(&mut self) -> Result<()> {
        let mut compressed = self.units.iter_mut().filter_map(|state| state.reduction.compressed_mut());
        compressed.try_for_each(CompressedReduction::roll_back)
    }

    pub(crate) fn num_round_sequences(&self) -> usize {
        let compressed = self.units.iter().filter_map(|state| state.reduction.compressed());
        compressed.map(|compressed| compressed.remaining_round_sequences.len()).max().unwrap_or(0)
    }

    pub(crate) fn compressors(&self) -> impl Iterator<Item = (&str, &Compressor)> {
        let units = self.table.units().iter().zip(&self.units);
        units.filter_map(|(unit, state)| {
            Some((&*unit.name, state.reduction.compressed()?.compressor.as_deref()?))
        })
    }

    pub(crate) fn compressors_mut(&mut self) -> impl Iterator<Item = (&str, &mut Compressor)> {
        let units = self.table.units().iter().zip(&mut self.units);
        units.filter_map(|(unit, state)| {
            Some((&*unit.name, state.reduction.compressed_mut()?.compressor.as_deref_mut()?))
        })
    }

    /// Returns the compression statistics of the last step over all units. The error norm has the scale of this rank's gradient sums.
    pub(crate) fn compression_statistics(&self) -> CompressionStatistics {
        let world_size = self.ranks.data().world_size();
        let mut all = CompressionStatistics::default();
        let mut squares = 0.0;
        for state in &self.units {
            let of_unit = match state.reduction.compressed() {
                Some(compressed) => compressed.statistics,
                None => CompressionStatistics::uncompressed(state.num_elements, world_size),
            };
            all.bytes_sent += of_unit.bytes_sent;
            all.bytes_uncompressed += of_unit.bytes_uncompressed;
            squares += f64::from(of_unit.error_norm).powi(2);
        }
        all.error_norm = squares.sqrt() as f32;
        all
    }

    /// The device of [`reduced`](Gradients::reduced).
    pub(crate) fn reduced_device(&self, unit: usize) -> &Device {
        if self.units[unit].shard.is_some() { &self.shards_device } else { &self.device }
    }

    /// The device of [`for_update`](Gradients::for_update).
    pub(crate) fn update_device(&self, unit: usize) -> &Device {
        if self.gathered.is_some() { &self.device } else { self.reduced_device(unit) }
    }

    /// The elements of a unit in [`reduced`](Gradients::reduced).
    pub(crate) fn part(&self, unit: usize) -> Range<usize> {
        self.units[unit].own.clone()
    }

    /// Returns this rank's shard of the reduced gradient of `unit`: the sum over all microbatches, in the dtype of the reduction.
    pub(crate) fn reduced(&self, unit: usize) -> View<'_> {
        self.units[unit].reduced()
    }
}

impl UnitGradient {
    /// Returns the shard if something was added to it since its last sum over replicas.
    fn pending(&mut self) -> Option<&mut ShardSum> {
        self.shard.as_mut().filter(|_| !self.is_finished)
    }

    fn reduced(&self) -> View<'_> {
        match &self.shard {
            Some(shard) => shard.vector.view(),
            None => {
                let sum = self.reduction.view(&self.reducible);
                sum.part(self.own.start, [self.own.len()].into())
            }
        }
    }
}

impl GradSink for Gradients {
    fn target(&mut self, span: &ParameterSpan) -> Result<GradTarget<'_>, DeviceError> {
        if let Some(open) = self.tied.as_mut().and_then(|tied| tied.target(span)) {
            return Ok(open);
        }
        let accumulate = self.written[span.first.0];
        let state = &mut self.units[span.unit];
        if state.open.is_none() {
            // The first gradient is written to the reducible vector, later ones to memory of their own.
            state.open = Some(match state.reducible.take() {
                Some(vector) => Gradient::Reducible(vector),
                None => Gradient::Partial(self.device.empty(
                    [state.num_elements].into(),
                    DType::F32,
                    Category::Gradients,
                )?),
            });
        }
        let gradient = state.open.as_mut().expect("it was opened above");
        let view = gradient.view_mut(state.num_elements).into_part(span.offset, span.shape);
        Ok(GradTarget { view, accumulate })
    }

    fn grad_ready(&mut self, span: &ParameterSpan) {
        if self.tied.as_mut().is_some_and(|tied| tied.end(span)) {
            return;
        }
        self.written[span.first.0..span.first.0 + span.num_parameters].fill(true);
    }
}
