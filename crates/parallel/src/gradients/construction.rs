//! Allocates gradients according to how ranks shard and reduce them.

use super::hierarchical::{HierarchicalReduction, Hierarchy};
use super::reduction::{Reduction, ReductionFactory};
use super::shard_sum::ShardSumFactory;
use super::{CompressedReduction, GradientLayout, Gradients, TiedGradients, TreeSum, UnitGradient};
use crate::error::{ParallelError, Result};
use crate::layout::RankGrid;
use crate::memory::{CountedMemory, Pool, WaitTracker};
use crate::parameters::{GatheredUnits, ReplicatedParameters};
use crate::step::ExecutorOptions;
use std::collections::VecDeque;
use std::sync::Arc;
use trireme_base::DType;
use trireme_schedule::ProgramHeader;
use trireme_tensor::{Category, Device, ParameterTable, UnitInfo};

impl Gradients {
    /// Allocates the gradients of all units. Shards are on `shards_device`; gradients of tied parameters take memory from the pool
    /// `messages`.
    pub(crate) fn new(
        table: &Arc<ParameterTable>,
        header: &ProgramHeader,
        ranks: &Arc<RankGrid>,
        device: &Device,
        shards_device: &Device,
        messages: &Pool,
        options: &ExecutorOptions,
    ) -> Result<Self> {
        let hierarchy = hierarchy(table, ranks, device, options)?;
        let layout = GradientLayout::new(header, ranks, options, hierarchy.is_some());
        let pool = layout.pool(ranks, device, options);
        // A unit of another pipeline rank has no gradient here. Without training, no unit has one.
        let is_held: Vec<bool> =
            (0..table.units().len()).map(|unit| header.holds(unit) && header.state.is_trained()).collect();
        let compressed = |unit: usize| {
            if layout.is_scattered() || !is_held[unit] {
                Ok(None)
            } else {
                CompressedReduction::new(table, unit, options, device, layout.group(&ranks.state.dense))
            }
        };
        let compressed = (0..table.units().len()).map(compressed).collect::<Result<Vec<_>, _>>()?;
        let block_rounded = if hierarchy.is_some() || compressed.iter().any(Option::is_some) {
            ReplicatedParameters::all(table, ranks, device, DType::F32)
        } else {
            ReplicatedParameters::none(table)
        };
        let counted = CountedMemory::new(device);
        let len = |(unit, info): (usize, &UnitInfo)| if is_held[unit] { info.num_elements } else { 0 };
        let sums = ranks.state.try_map(|state| -> Result<_> {
            let (dtype, group) = (layout.dtype, layout.group(state));
            let reductions = if layout.is_scattered() {
                ReductionFactory::reduce_scatter(dtype, group, !layout.has_shards(state), device)
            } else {
                // Backward starts with the last unit.
                let units = table.units().iter().enumerate().rev();
                let reduced = units.filter(|(unit, info)| {
                    std::ptr::eq(ranks.state_of(info), state) && compressed[*unit].is_none()
                });
                let lens: Vec<usize> = reduced.map(len).collect();
                // A fused gradient would be summed only when the gradients of other units are there.
                let fusion_bytes = if layout.updates_early { 0 } else { options.fusion_bytes };
                ReductionFactory::all_reduce(
                    dtype,
                    group,
                    fusion_bytes,
                    &lens,
                    !layout.updates_early,
                    &counted,
                )?
            };
            Ok((
                reductions,
                ShardSumFactory::new(layout.shard_dtype, options.determinism, state, shards_device),
            ))
        })?;
        let mut units = Vec::with_capacity(table.units().len());
        for ((index, info), compressed) in table.units().iter().enumerate().zip(compressed) {
            let (ranks, (reductions, shards)) = (ranks.state_of(info), sums.of(info));
            let num_elements = len((index, info));
            let len = if is_held[index] && layout.is_scattered() { info.padded_len() } else { num_elements };
            let own = if is_held[index] {
                info.shard(ranks.shards.rank().0, ranks.shards.world_size())
            } else {
                0..0
            };
            let stays = layout.keeps_full() || compressed.is_some();
            if layout.keeps_full() && !layout.is_scattered() && compressed.is_none() && !pool.is_on_device() {
                counted.charge_mapped(layout.group(ranks).peer_bytes_mapped(len * size_of::<f32>()))?;
            }
            units.push(UnitGradient {
                num_elements,
                len,
                reducible: if stays { Some(pool.take(len)?) } else { None },
                open: None,
                sum: TreeSum::new(),
                reduction: match (compressed, &hierarchy) {
                    (Some(compressed), _) => Reduction::Compressed(compressed),
                    (None, Some(hierarchy)) => {
                        Reduction::Hierarchical(HierarchicalReduction::new(hierarchy, info))
                    }
                    (None, None) => reductions.reduction(len)?,
                },
                is_finished: false,
                shard: (layout.has_shards(ranks) && is_held[index]).then(|| shards.shard(own.len())),
                own,
            });
        }
        drop(sums);
        Ok(Gradients {
            device: device.clone(),
            shards_device: shards_device.clone(),
            determinism: options.determinism,
            layout,
            header: header.clone(),
            written: vec![false; table.parameters().len()],
            table: Arc::clone(table),
            ranks: Arc::clone(ranks),
            in_flight: VecDeque::with_capacity(units.len()),
            units,
            // Gradients are gathered from their shards if each rank updates full units.
            gathered: layout.is_gathered().then(|| GatheredUnits::empty(table, ranks, &pool)),
            pool,
            counted,
            block_rounded,
            tied: TiedGradients::new(header, table.tie(), messages),
            waiting: WaitTracker::default(),
        })
    }

    /// Frees all memory of gradients. Between steps, gradients hold no values.
    pub(crate) fn release(&mut self) {
        self.units.clear();
        self.pool = Pool::new(self.ranks.world(), &self.device, DType::F32, Category::Gradients, false);
        (self.gathered, self.tied) = (None, None);
        self.block_rounded = ReplicatedParameters::none(&self.table);
        self.counted = CountedMemory::new(&self.device);
    }
}

/// Returns the levels of the quantized reduction, if the options ask for it and ranks are split by host.
fn hierarchy(
    table: &ParameterTable,
    ranks: &RankGrid,
    device: &Device,
    options: &ExecutorOptions,
) -> Result<Option<Arc<Hierarchy>>> {
    let Some((levels, format)) = ranks.levels.as_ref().zip(options.zero_plus_plus.quantized_gradients) else {
        return Ok(None);
    };
    match table.parameters().iter().find(|info| !info.class.has_gradient()) {
        Some(info) => Err(ParallelError::QuantizedLoadCounts { parameter: info.name.clone() }),
        None => Ok(Some(Arc::new(Hierarchy::new(levels, format, device)))),
    }
}
