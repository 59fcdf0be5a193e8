//! The memory that gradients take from the beginning, by what ranks shard and how they exchange it.

use super::{Gradients, UnitGradient};
use crate::compressed::Compressed;
use crate::counted::Counted;
use crate::error::ParallelError;
use crate::hierarchical::{Hierarchical, Hierarchy};
use crate::holders::Holders;
use crate::parameters::wholes::Gathered;
use crate::pool::Pool;
use crate::ranks::{RankGrid, StateRanks};
use crate::reduction::{Reduction, Summations};
use crate::shard_sum::shard_sums;
use crate::step::ExecutorOptions;
use crate::tied::TiedGradients;
use crate::tree::TreeSum;
use crate::waiting::Waiting;
use std::collections::VecDeque;
use std::sync::Arc;
use trireme_codec::CodecName;
use trireme_schedule::{Outline, StateClass};
use trireme_tensor::{Category, Device, ParameterClass, ParameterTable, Precision};

impl Gradients {
    /// Takes memory for what stays of every unit's gradient. Shards lie on a device of their own; parts of tied gradients come from the pool of messages.
    pub(crate) fn new(
        table: &Arc<ParameterTable>,
        outline: &Outline,
        ranks: &Arc<RankGrid>,
        (device, shards_device): (&Device, &Device),
        messages: &Pool<f32>,
        options: &ExecutorOptions,
    ) -> Result<Self, ParallelError> {
        let are_shards_kept = outline.state.is_sharded(StateClass::Gradients);
        let is_sharded = are_shards_kept || outline.state.is_sharded(StateClass::Optimizer);
        let group = if is_sharded { ranks.shards() } else { ranks.replicas() };
        let format = options.zero_plus_plus.quantized_gradients;
        let hierarchy =
            ranks.levels().zip(format).map(|(levels, format)| Hierarchy::new(levels, format, device));
        let hierarchy = hierarchy.map(Arc::new);
        let counts = || table.parameters().iter().find(|info| info.class == ParameterClass::Balance);
        if let Some(info) = hierarchy.as_ref().and_then(|_| counts()) {
            return Err(ParallelError::RoundedBesideLoads { parameter: info.name.clone() });
        }
        let is_wide = group.world_size() == 1 || hierarchy.is_some();
        let dtype = if is_wide { Precision::F32 } else { options.reduce_dtype };
        let is_rounded = dtype != Precision::F32;
        let keeps_whole = !are_shards_kept && !is_rounded;
        let category = if keeps_whole { Category::Gradients } else { Category::Communication };
        let is_gathered = are_shards_kept && !outline.state.is_sharded(StateClass::Optimizer);
        let is_exchanged = is_gathered || is_sharded && !is_rounded && hierarchy.is_none();
        let pool = Pool::new(group, device, category, is_exchanged);
        // Codecs work on the host.
        let is_compressed = options.compression.codec() != CodecName::None;
        let pool = if is_compressed { pool.with_buffers() } else { pool };
        // Parts of gradients are gathered where all of a unit is updated by them.
        let gathered = is_gathered.then(|| Gathered::absent(table, device, ranks, &pool));
        let needs_shards =
            |state: &StateRanks| are_shards_kept || is_sharded && state.replicas.world_size() > 1;
        let is_summed = are_shards_kept && outline.num_microbatches > 1;
        let shard_precision = if is_summed { Precision::F32 } else { dtype };
        // A unit that lies elsewhere in the pipeline has no gradient here. Without training, no unit has one.
        let holds = |unit| outline.holds(unit) && outline.state.is_trained();
        let num_elements = |unit| if holds(unit) { table.units()[unit].num_elements } else { 0 };
        let compressed = (0..table.units().len()).map(|unit| match is_sharded || !holds(unit) {
            true => Ok(None),
            false => Compressed::new(table, unit, options, device, group),
        });
        let compressed = compressed.collect::<Result<Vec<_>, _>>()?;
        let rounded_apart = match hierarchy.is_some() || compressed.iter().any(Option::is_some) {
            true => Holders::of_all(table, ranks, device),
            false => Holders::none(table),
        };
        // Backward starts with the last unit.
        let counted = Counted::new(device);
        // Of units without experts, and of those with experts where other ranks have other ones.
        let mut makers = Vec::new();
        for has_experts in [false, true] {
            let is_one = |unit: &usize| (table.units()[*unit].num_experts > 0) == has_experts;
            let state = match (0..compressed.len()).find(is_one) {
                Some(unit) => ranks.state_of(&table.units()[unit]),
                None => ranks.state(),
            };
            let is_alike = ranks.experts().is_none();
            let uncompressed = (0..compressed.len()).rev().filter(|&unit| compressed[unit].is_none());
            let lens: Vec<usize> =
                uncompressed.filter(|unit| is_alike || is_one(unit)).map(num_elements).collect();
            let group = if is_sharded { &state.shards } else { &state.replicas };
            let exchanges = match is_sharded {
                true => Summations::ReduceScatter { stay: !needs_shards(state) },
                false => Summations::AllReduce {
                    fusion_bytes: options.fusion_bytes,
                    lens: &lens,
                    counted: &counted,
                },
            };
            let make_reduction = exchanges.reductions(dtype, group, device)?;
            let make_shard = shard_sums(shard_precision, options.determinism, state, shards_device);
            makers.push((make_reduction, make_shard));
            if is_alike {
                break;
            }
        }
        let mut units = Vec::new();
        for ((index, unit), compressed) in table.units().iter().enumerate().zip(compressed) {
            let is_held = holds(index);
            let state = ranks.state_of(unit);
            let kind = usize::from(unit.num_experts > 0).min(makers.len() - 1);
            let (make_reduction, make_shard) = &makers[kind];
            let group = if is_sharded { &state.shards } else { &state.replicas };
            let num_elements = num_elements(index);
            let len = if is_held && is_sharded { unit.padded_len() } else { num_elements };
            let own = match is_held {
                true => unit.shard(state.shards.rank().0, state.shards.world_size()),
                false => 0..0,
            };
            let is_compressed = compressed.is_some();
            let reduction = match (compressed, &hierarchy) {
                (Some(compressed), _) => Reduction::Compressed(compressed),
                (None, Some(hierarchy)) => Reduction::Hierarchical(Hierarchical::new(hierarchy, unit)),
                (None, None) => make_reduction(len)?,
            };
            if keeps_whole && !is_sharded && !is_compressed {
                counted.map(group.peer_bytes_mapped(len * size_of::<f32>()))?;
            }
            units.push(UnitGradient {
                num_elements,
                len,
                reducible: if keeps_whole || is_compressed { Some(pool.take(len)?) } else { None },
                open: None,
                sum: TreeSum::new(),
                reduction,
                is_finished: false,
                shard: (needs_shards(state) && is_held).then(|| make_shard(own.len())),
                own,
            });
        }
        Ok(Gradients {
            device: device.clone(),
            shards_device: shards_device.clone(),
            determinism: options.determinism,
            outline: outline.clone(),
            written: vec![false; table.parameters().len()],
            table: Arc::clone(table),
            ranks: Arc::clone(ranks),
            under_way: VecDeque::with_capacity(units.len()),
            units,
            pool,
            keeps_whole,
            is_rounded,
            gathered,
            counted,
            rounded_apart,
            tied: TiedGradients::new(outline, table.tie(), messages),
            waiting: Waiting::default(),
        })
    }

    /// Gives all memory back, in which there is nothing between steps, before others take the place of these.
    pub(crate) fn release(&mut self) {
        self.units.clear();
        self.pool = Pool::new(self.ranks.world(), &self.device, Category::Gradients, false);
        (self.gathered, self.tied) = (None, None);
        self.rounded_apart = Holders::none(&self.table);
        self.counted = Counted::new(&self.device);
    }
}
