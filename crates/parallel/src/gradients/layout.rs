use crate::layout::{RankGrid, StateRanks};
use crate::memory::Pool;
use crate::step::ExecutorOptions;
use std::sync::Arc;
use trireme_base::DType;
use trireme_codec::CodecName;
use trireme_comm::Group;
use trireme_schedule::{ProgramHeader, StateClass};
use trireme_tensor::{Category, Device};

/// The portion of gradients that a rank stores, and the precision in which ranks reduce them.
#[derive(Debug, Clone, Copy)]
pub(super) struct GradientLayout {
    pub(super) shards_gradients: bool,
    shards_optimizer: bool,
    /// Whether units are updated early, and their gradients freed.
    pub(super) updates_early: bool,
    /// Whether gradients are reduced as integers, within hosts and then across them.
    is_hierarchical: bool,
    /// The dtype in which gradients are reduced, unless they are reduced as integers.
    pub(super) dtype: DType,
    pub(super) shard_dtype: DType,
}

impl GradientLayout {
    pub(super) fn new(
        header: &ProgramHeader,
        ranks: &RankGrid,
        options: &ExecutorOptions,
        is_hierarchical: bool,
    ) -> Self {
        let shards_gradients = header.state.is_sharded(StateClass::Gradients);
        let mut layout = GradientLayout {
            shards_gradients,
            shards_optimizer: header.state.is_sharded(StateClass::Optimizer),
            updates_early: header.state.updates_early,
            is_hierarchical,
            dtype: DType::F32,
            shard_dtype: DType::F32,
        };
        let num_ranks = layout.group(&ranks.state.dense).world_size();
        [layout.dtype, layout.shard_dtype] = options.gradient_dtypes(header, num_ranks, is_hierarchical);
        layout
    }

    /// Whether each rank receives only its shard of a sum (reduce-scatter).
    pub(super) fn is_scattered(&self) -> bool {
        self.shards_gradients || self.shards_optimizer
    }

    /// Returns the ranks over which a gradient is reduced first.
    pub(super) fn group<'a>(&self, ranks: &'a StateRanks) -> &'a Arc<Group> {
        if self.is_scattered() { &ranks.shards } else { &ranks.replicas }
    }

    /// Whether gradients are rounded to 16 bits before they are reduced.
    pub(super) fn is_rounded(&self) -> bool {
        self.dtype != DType::F32
    }

    /// Whether updates read the full gradients in f32.
    fn updates_read_full(&self) -> bool {
        !self.shards_gradients && !self.is_rounded()
    }

    /// Whether full gradients in f32 stay allocated with their units, so that reductions need no other memory.
    pub(super) fn keeps_full(&self) -> bool {
        self.updates_read_full() && !self.updates_early
    }

    /// Whether reduced gradients are gathered from the shards, because each rank updates full units.
    pub(super) fn is_gathered(&self) -> bool {
        self.shards_gradients && !self.shards_optimizer
    }

    /// Whether a rank stores its shard of a gradient separately from the full gradient.
    pub(super) fn has_shards(&self, ranks: &StateRanks) -> bool {
        self.shards_gradients || self.is_scattered() && ranks.replicas.world_size() > 1
    }

    /// Returns a pool for full gradients in f32.
    pub(super) fn pool(&self, ranks: &RankGrid, device: &Device, options: &ExecutorOptions) -> Pool {
        let category = if self.updates_read_full() { Category::Gradients } else { Category::Communication };
        let is_reduced_as_is = !self.is_rounded() && !self.is_hierarchical;
        let is_exchanged =
            self.is_gathered() || is_reduced_as_is && (self.is_scattered() || self.updates_early);
        // Codecs run on the host.
        let is_compressed = options.compression.codec() != CodecName::None;
        let new = if is_compressed { Pool::in_group_memory } else { Pool::new };
        new(self.group(&ranks.state.dense), device, DType::F32, category, is_exchanged)
    }
}
