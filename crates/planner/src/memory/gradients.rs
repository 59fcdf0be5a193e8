//! Gradients of every unit: accumulated over microbatches, reduced over ranks.

use super::hierarchy::Hierarchy;
use super::pool::Pool;
use crate::setup::{CompressionMemory, MemorySetup};
use crate::usage::Usage;
use std::collections::VecDeque;
use trireme_base::{Category, DType};
use trireme_schedule::{Outline, StateClass, ZeroStage};

/// Whole gradients of one length that are under way at a time, as the executor bounds them.
const IN_FLIGHT_MAX: usize = 2;

const F32: usize = size_of::<f32>();

/// How many terms a sum over a binary tree holds, of which the first lies in the memory that groups reduce.
#[derive(Debug, Clone, Copy, Default)]
struct TreeSum {
    num_terms: u32,
}

impl TreeSum {
    /// Partial sums beside the first.
    fn num_partials(self) -> usize {
        (self.num_terms.count_ones() as usize).saturating_sub(1)
    }
}

#[derive(Debug, Default)]
struct UnitGradient {
    /// The memory that groups reduce is here and empty.
    is_ready: bool,
    /// Being written: where a partial sum is, its bytes.
    open: Option<usize>,
    sum: TreeSum,
    /// The sum over ranks is here, in 16 bits.
    is_reduced: bool,
    /// Of sums of integers: the level under way.
    level: usize,
    shard: TreeSum,
}

#[derive(Debug)]
pub(super) struct Gradients<'a> {
    setup: &'a MemorySetup,
    outline: Outline,
    units: Vec<UnitGradient>,
    /// Whole gradients in f32.
    wholes: Pool,
    /// Those that are rounded.
    narrow: Pool,
    /// Sums of integers within hosts and across them.
    hierarchy: Option<Hierarchy>,
    keeps_whole: bool,
    is_pool_under_way: bool,
    has_shards: bool,
    /// Whether what is not compressed is rounded to 16 bits.
    rounds: bool,
    under_way: VecDeque<usize>,
}

impl<'a> Gradients<'a> {
    pub(super) fn new(setup: &'a MemorySetup, outline: &Outline, usage: &mut Usage) -> Self {
        let stage = outline.zero_stage;
        let is_sharded = stage >= ZeroStage::One;
        let group_size = if is_sharded { setup.num_shards } else { setup.num_replicas };
        let hierarchy = Hierarchy::new(setup);
        let rounds = setup.rounds(group_size);
        let keeps_whole = stage < ZeroStage::Two && !rounds;
        let category = if keeps_whole { Category::Gradients } else { Category::Communication };
        let is_pool_under_way = is_sharded && !rounds;
        let is_pool_mapped = is_pool_under_way && hierarchy.is_none() && setup.shards_share_memory;
        let has_shards = is_sharded && (stage >= ZeroStage::Two || setup.num_replicas > 1);
        let narrow = if has_shards { Category::Communication } else { Category::Gradients };
        let mut gradients = Gradients {
            setup,
            outline: outline.clone(),
            units: setup.units.iter().map(|_| UnitGradient::default()).collect(),
            wholes: Pool::new(category, F32, group_size, is_pool_mapped),
            narrow: Pool::new(narrow, setup.reduce_dtype.size(), group_size, setup.shards_share_memory),
            hierarchy,
            keeps_whole,
            is_pool_under_way,
            has_shards,
            rounds,
            under_way: VecDeque::new(),
        };
        (0..setup.units.len()).for_each(|unit| gradients.settle(unit, usage));
        if !is_sharded && !setup.replicas_share_memory && group_size > 1 {
            usage.take(Category::Communication, fusion_bytes(setup));
        }
        gradients
    }

    fn len(&self, unit: usize) -> usize {
        let unit = &self.setup.units[unit];
        if self.is_sharded() { unit.padded_len } else { unit.len }
    }

    fn is_sharded(&self) -> bool {
        self.outline.zero_stage >= ZeroStage::One
    }

    /// Whether a unit's gradient is rounded to 16 bits.
    fn is_rounded(&self, unit: usize) -> bool {
        self.rounds && self.setup.units[unit].compression.is_none()
    }

    /// Takes what stays of a unit's gradient.
    fn settle(&mut self, unit: usize, usage: &mut Usage) {
        let (setup, len) = (self.setup, self.len(unit));
        let compression = &setup.units[unit].compression;
        match compression {
            Some(compression) => {
                take_compression(setup, compression, len, usage);
            }
            None if self.is_sharded() => (),
            None => {
                let num_bytes = len * if self.rounds { setup.reduce_dtype.size() } else { F32 };
                usage.take_mapped(setup.mapped_of_replicas(num_bytes));
                usage.take(Category::Gradients, if self.rounds { num_bytes } else { 0 });
            }
        }
        if self.keeps_whole || compression.is_some() {
            self.wholes.take(len, usage);
            self.units[unit].is_ready = true;
        }
        if self.has_shards && !setup.is_away(StateClass::Gradients) {
            let num_bytes = setup.units[unit].shard_len * self.shard_dtype().size();
            usage.take(Category::Gradients, num_bytes);
            usage.take_mapped(setup.mapped_of_replicas(num_bytes));
        }
    }

    fn shard_dtype(&self) -> DType {
        self.setup.shard_dtype(&self.outline)
    }

    /// Makes room for the gradients that backward of `unit` writes.
    pub(super) fn prepare(&mut self, unit: usize, usage: &mut Usage) {
        if self.keeps_whole {
            return;
        }
        let written: Vec<usize> = self.outline.writes(unit).collect();
        written.into_iter().for_each(|unit| self.take_whole(unit, usage));
    }

    fn take_whole(&mut self, unit: usize, usage: &mut Usage) {
        let state = &self.units[unit];
        if state.is_ready || state.open.is_some() || state.sum.num_terms > 0 {
            return;
        }
        let len = self.len(unit);
        loop {
            let must_wait = self.under_way.contains(&unit) || (self.is_pool_under_way && self.is_full(len));
            if !must_wait {
                break;
            }
            self.finish_first(usage);
        }
        self.wholes.take(len, usage);
        self.units[unit].is_ready = true;
    }

    /// Whether as many whole gradients of `len` elements are under way as may be.
    fn is_full(&self, len: usize) -> bool {
        self.under_way.iter().filter(|&&unit| self.len(unit) == len).count() >= IN_FLIGHT_MAX
    }

    /// Backward writes into the memory of the group first, and into partial sums after.
    pub(super) fn open(&mut self, unit: usize, usage: &mut Usage) {
        let written: Vec<usize> = self.outline.writes(unit).collect();
        for unit in written {
            let partial = self.setup.on_device(self.setup.units[unit].len);
            let state = &mut self.units[unit];
            if state.open.is_none() {
                let partial = if std::mem::take(&mut state.is_ready) { 0 } else { partial };
                state.open = Some(partial);
                usage.take(Category::Gradients, partial);
            }
        }
    }

    /// Ends a microbatch's backward of `unit`.
    pub(super) fn close(&mut self, unit: usize, usage: &mut Usage) {
        if self.setup.adds_in_place {
            return;
        }
        let partial = self.setup.on_device(self.setup.units[unit].len);
        let state = &mut self.units[unit];
        let before = state.sum.num_partials() + usize::from(state.open.take().is_some_and(|bytes| bytes > 0));
        state.sum.num_terms += 1;
        usage.give(Category::Gradients, (before - state.sum.num_partials()) * partial);
    }

    /// Starts the reduction of `unit`.
    pub(super) fn reduce(&mut self, unit: usize, usage: &mut Usage) {
        let partial = self.setup.on_device(self.setup.units[unit].len);
        let len = self.len(unit);
        while self.rounds && self.has_shards && self.is_full(len) {
            self.finish_first(usage);
        }
        let is_rounded = self.is_rounded(unit);
        let state = &mut self.units[unit];
        let sum = std::mem::take(&mut state.sum);
        usage.give(Category::Gradients, sum.num_partials() * partial);
        state.open = None;
        if is_rounded {
            let has_narrow = std::mem::take(&mut state.is_reduced);
            if self.is_sharded() {
                if has_narrow {
                    self.narrow.give(len);
                }
                self.narrow.take(len, usage);
            }
            self.wholes.give(len);
        }
        if let Some(hierarchy) = &mut self.hierarchy {
            hierarchy.start(unit, 0, usage);
            self.units[unit].level = 0;
        }
        self.under_way.push_back(unit);
    }

    /// Waits for the message under way of the reduction that was started first.
    fn finish_first(&mut self, usage: &mut Usage) {
        let unit = self.under_way.pop_front().expect("something is under way");
        let len = self.len(unit);
        if let Some(hierarchy) = &mut self.hierarchy {
            let level = &mut self.units[unit].level;
            hierarchy.finish(unit, *level);
            *level += 1;
            if *level < hierarchy.num_levels() {
                hierarchy.start(unit, *level, usage);
                self.under_way.push_back(unit);
                return;
            }
        }
        if self.has_shards {
            self.add_to_shard(unit, usage);
        }
        match (self.is_rounded(unit), self.has_shards) {
            (true, true) => self.narrow.give(len),
            (true, false) => self.units[unit].is_reduced = true,
            (false, true) if !self.keeps_whole => self.wholes.give(len),
            (false, _) => self.units[unit].is_ready = true,
        }
    }

    fn add_to_shard(&mut self, unit: usize, usage: &mut Usage) {
        if self.shard_dtype() != DType::F32 {
            return;
        }
        let partial = self.setup.on_device(self.setup.units[unit].shard_len);
        let sum = &mut self.units[unit].shard;
        let before = sum.num_partials() + usize::from(sum.num_terms > 0);
        usage.take(Category::Gradients, if sum.num_terms > 0 { partial } else { 0 });
        sum.num_terms = if self.setup.adds_in_place { 1 } else { sum.num_terms + 1 };
        usage.give(Category::Gradients, (before - sum.num_partials()) * partial);
    }

    /// Waits for every reduction.
    pub(super) fn finish(&mut self, usage: &mut Usage) {
        while !self.under_way.is_empty() {
            self.finish_first(usage);
        }
        for (unit, state) in self.units.iter_mut().enumerate() {
            let partial = self.setup.on_device(self.setup.units[unit].shard_len);
            let sum = std::mem::take(&mut state.shard);
            usage.give(Category::Gradients, sum.num_partials() * partial);
        }
        (0..self.units.len()).for_each(|unit| self.read(unit, usage));
    }

    /// Waits for the reduction of one unit ahead of the others, and reads it.
    pub(super) fn finish_ahead(&mut self, unit: usize, usage: &mut Usage) {
        while self.under_way.contains(&unit) {
            self.finish_first(usage);
        }
        self.read(unit, usage);
    }

    /// Reads a unit's reduced gradient, in f32.
    pub(super) fn read(&mut self, unit: usize, usage: &mut Usage) {
        let is_narrow = self.is_rounded(unit) && !(self.has_shards && self.shard_dtype() == DType::F32);
        let wide = self.setup.on_device(self.setup.units[unit].shard_len);
        usage.touch(Category::Communication, if is_narrow { wide } else { 0 });
    }
}

/// Takes what the compressed reduction of `len` elements needs besides them: the most of any kind of step.
fn take_compression(setup: &MemorySetup, compression: &CompressionMemory, len: usize, usage: &mut Usage) {
    let mapped =
        |messages: &[usize]| messages.iter().map(|&bytes| setup.mapped_of_replicas(bytes)).sum::<usize>();
    let of_step = |messages: &Vec<usize>| (messages.iter().sum::<usize>(), mapped(messages));
    let largest = compression.messages.iter().map(of_step).max_by_key(|(own, mapped)| own + mapped);
    let (own, mapped) = largest.unwrap_or_default();
    let whole = if compression.sends_whole { setup.mapped_of_replicas(len * F32) } else { 0 };
    usage.take(Category::Communication, compression.compressor_bytes + own);
    usage.take_mapped(mapped + whole);
}

/// Bytes of the batches in which short gradients travel, in the order of their reductions.
fn fusion_bytes(setup: &MemorySetup) -> usize {
    let element_bytes = setup.reduce_dtype.size();
    let len_max = setup.fusion_bytes / element_bytes;
    let (mut num_batches, mut open) = (0, None);
    for unit in setup.units.iter().rev().filter(|unit| unit.compression.is_none()) {
        if len_max == 0 || unit.len > len_max / 2 {
            open = None;
            continue;
        }
        open = match open {
            Some(len) if len + unit.len <= len_max => Some(len + unit.len),
            _ => {
                num_batches += 1;
                Some(unit.len)
            }
        };
    }
    num_batches * len_max * element_bytes
}
