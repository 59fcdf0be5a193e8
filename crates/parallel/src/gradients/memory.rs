//! The memory that gradients take from the beginning, by what ranks shard and how they exchange it.

use super::{Gradients, UnitGradient};
use crate::compressed::Compressed;
use crate::counted::Counted;
use crate::error::ParallelError;
use crate::hierarchical::{Hierarchical, Hierarchy};
use crate::pool::Pool;
use crate::ranks::RankGrid;
use crate::reduction::{Exchanges, Reduction};
use crate::shard_sum::ShardSums;
use crate::step::ExecutorOptions;
use crate::tree::TreeSum;
use crate::waiting::Waiting;
use std::collections::VecDeque;
use std::sync::Arc;
use trireme_schedule::{Outline, StateClass};
use trireme_tensor::{Category, Device, ParameterTable, Precision};

impl Gradients {
    /// Takes memory for what stays of every unit's gradient from the group. Shards are counted on a device of their own.
    pub(crate) fn new(
        table: &Arc<ParameterTable>,
        outline: &Outline,
        ranks: &Arc<RankGrid>,
        (device, shards_device): (&Device, &Device),
        options: &ExecutorOptions,
    ) -> Result<Self, ParallelError> {
        let are_shards_kept = outline.state.is_sharded(StateClass::Gradients);
        let is_sharded = are_shards_kept || outline.state.is_sharded(StateClass::Optimizer);
        let group = if is_sharded { ranks.shards() } else { ranks.replicas() };
        let format = options.zero_plus_plus.quantized_gradients;
        let hierarchy =
            ranks.levels().zip(format).map(|(levels, format)| Hierarchy::new(levels, format, device));
        let hierarchy = hierarchy.map(Arc::new);
        let is_wide = group.world_size() == 1 || hierarchy.is_some();
        let dtype = if is_wide { Precision::F32 } else { options.reduce_dtype };
        let keeps_whole = !are_shards_kept && dtype == Precision::F32;
        let category = if keeps_whole { Category::Gradients } else { Category::Communication };
        let is_pool_under_way = is_sharded && dtype == Precision::F32;
        let is_gathered = are_shards_kept && !outline.state.is_sharded(StateClass::Optimizer);
        let is_exchanged = is_gathered || is_pool_under_way && hierarchy.is_none();
        let pool = Pool::new(group, device, category, is_exchanged);
        let needs_shards = are_shards_kept || is_sharded && ranks.replicas().world_size() > 1;
        let exchanges = if is_sharded {
            Exchanges::scattering(group, device, !needs_shards)
        } else {
            Exchanges::fusing(group, options.fusion_bytes)
        };
        let is_summed = are_shards_kept && outline.num_microbatches > 1;
        let shard_precision = if is_summed { Precision::F32 } else { dtype };
        let is_narrow_pooled = needs_shards && dtype != Precision::F32;
        let shard_sums = ShardSums::new(ranks, options.determinism, shards_device);
        let (mut units, counted) = (Vec::new(), Counted::new(device));
        for (index, unit) in table.units().iter().enumerate() {
            // Of a unit that lies elsewhere in the pipeline there is no gradient.
            let is_held = outline.holds(index);
            let len = match is_held {
                true if is_sharded => unit.padded_len(),
                true => unit.num_elements,
                false => 0,
            };
            let own = match is_held {
                true => unit.shard(ranks.shards().rank().0, ranks.shards().world_size()),
                false => 0..0,
            };
            let compressed = match is_sharded || !is_held {
                true => None,
                false => Compressed::new(table, index, options, device, group)?,
            };
            let reduction = match (compressed, &hierarchy) {
                (Some(compressed), _) => Reduction::Compressed(compressed),
                (None, Some(hierarchy)) => Reduction::Hierarchical(Hierarchical::new(hierarchy, unit)),
                (None, None) => Reduction::new(len, dtype, &exchanges, &counted, group)?,
            };
            let is_compressed = matches!(reduction, Reduction::Compressed(_));
            let reducible = if keeps_whole || is_compressed { Some(pool.take(len)?) } else { None };
            let shard = (needs_shards && is_held).then(|| shard_sums.sum(own.len(), shard_precision));
            let num_elements = if is_held { unit.num_elements } else { 0 };
            let (shape, sum) = ([num_elements].into(), TreeSum::new());
            let (open, reduced) = (None, None);
            units.push(UnitGradient {
                shape,
                len,
                own,
                reducible,
                open,
                sum,
                reduction,
                reduced,
                is_finished: false,
                shard,
                gathered: None,
            });
        }
        if let Exchanges::Fusing(fusions) = &exchanges {
            // Backward starts with the last unit.
            let fused = units.iter().rev().filter(|unit| !matches!(unit.reduction, Reduction::Compressed(_)));
            let lens = fused.map(|unit| unit.shape.num_elements());
            fusions.reserve(lens, options.reduce_dtype, &counted, group)?;
        }
        let (pool, staying) = if keeps_whole { (None, Some(pool)) } else { (Some(pool), None) };
        Ok(Gradients {
            device: device.clone(),
            determinism: options.determinism,
            outline: outline.clone(),
            written: vec![false; table.parameters().len()],
            table: Arc::clone(table),
            ranks: Arc::clone(ranks),
            under_way: VecDeque::with_capacity(units.len()),
            units,
            pool,
            staying,
            is_pool_under_way,
            is_narrow_pooled,
            exchanges,
            counted,
            tied: None,
            waiting: Waiting::default(),
        })
    }

    /// Gives all memory back, in which there is nothing between steps, before others take the place of these.
    pub(crate) fn release(&mut self) {
        self.units.clear();
        (self.pool, self.staying) = (None, None);
        self.tied = None;
        self.counted = Counted::new(&self.device);
    }
}
