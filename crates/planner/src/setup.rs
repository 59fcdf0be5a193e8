//! What the planner is told of a model and a layout.

use crate::usage::CategoryBytes;
use trireme_base::{DType, UnitPasses};
use trireme_schedule::lowering::{Offload, Tier};
use trireme_schedule::{Outline, StateClass, ZeroStage};

/// A unit of the model on one rank.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct UnitMemory {
    /// Elements of its parameters.
    pub len: usize,
    /// The same with what fills up the last shards.
    pub padded_len: usize,
    /// Elements of them that this rank steps.
    pub shard_len: usize,
    /// What its passes take.
    pub passes: UnitPasses,
    /// f32 elements of the message with what it passes on.
    pub activation_len: usize,
    /// f32 elements of the message with the gradient of that.
    pub gradient_len: usize,
    /// Bytes of the optimizer's state.
    pub optimizer_bytes: usize,
    /// Bytes that its update takes for a moment.
    pub step_scratch: usize,
    /// What its update exchanges with the other shards, in order.
    pub step_exchanges: Vec<StepExchange>,
    /// How its gradient is compressed, if it is.
    pub compression: Option<CompressionMemory>,
}

/// What the compressed reduction of a gradient takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CompressionMemory {
    /// Bytes of what the compressor holds, and of copies of it.
    pub compressor_bytes: usize,
    /// For each kind of step that a run has: bytes of the messages of each round that a rank has memory for.
    pub messages: Vec<Vec<usize>>,
    /// Whether there are steps that send the gradient as it is, beside the compressor.
    pub sends_whole: bool,
}

/// The ranks of a replica by hosts, on each of which there are equally many, where they spare the network between hosts (ZeRO++).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostLevels {
    /// Ranks of a host.
    pub num_local: usize,
    /// Hosts.
    pub num_hosts: usize,
    /// Whether the ranks of a host read each other's memory.
    pub shares_memory: bool,
    /// For each unit: bytes of a message with one shard's parameters, if they are gathered as integers.
    pub parameter_messages: Option<Vec<usize>>,
    /// For each unit: bytes of a message with one shard's gradient, if they are summed as integers.
    pub gradient_messages: Option<Vec<usize>>,
    /// For each unit: elements of this rank's share of its host's copy, if hosts keep copies.
    pub secondary_lens: Option<Vec<usize>>,
}

/// A vector that an optimizer exchanges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepExchange {
    /// Its elements.
    pub len: usize,
    /// Bytes of each.
    pub element_bytes: usize,
}

/// Elements of what a unit of a pipeline reads of another one's parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TiedLens {
    /// The parameters, of which it has a part of the gradient.
    pub span: usize,
    /// All parameters of their unit, of which there is a copy where that one is on another rank.
    pub unit: usize,
}

/// A tensor of a microbatch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchMemory {
    /// Its bytes.
    pub bytes: usize,
    /// The units that read it.
    pub readers: Vec<usize>,
}

/// A model in one layout, as one rank sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct MemorySetup {
    /// In forward order.
    pub units: Vec<UnitMemory>,
    /// The tensors of a microbatch.
    pub batch: Vec<BatchMemory>,
    /// Parameters that a unit reads which are another one's, if there are any.
    pub tied: Option<TiedLens>,
    /// What is there all the time whatever the program does, but for the optimizer's state: tables of the model, what the
    /// group takes.
    pub fixed: CategoryBytes,
    /// Ranks that shard a replica of the training state.
    pub num_shards: usize,
    /// Replicas of the training state.
    pub num_replicas: usize,
    /// What the ranks of a replica spare the network between its hosts, if anything.
    pub levels: Option<HostLevels>,
    /// Whether the ranks of a replica read each other's memory: then they map a part of it.
    pub shards_share_memory: bool,
    /// Whether the ranks with one shard do.
    pub replicas_share_memory: bool,
    /// What whole parameters are gathered in.
    pub gather_dtype: DType,
    /// What gradients are rounded to before they are reduced.
    pub reduce_dtype: DType,
    /// Bytes of short gradients that travel as one message, where ranks do not share memory.
    pub fusion_bytes: usize,
    /// Where state lives. What moves, and when, the program says.
    pub places: Offload,
    /// Bytes of a chunk in which state comes from a disk.
    pub disk_chunk_bytes: usize,
    /// Bytes on their way to a disk at most, for each class of state there.
    pub disk_write_bytes: usize,
    /// Whether gradients of microbatches are added in place, whatever the order.
    pub adds_in_place: bool,
    /// What the device rounds sizes of its memory up to.
    pub alignment: usize,
}

impl MemorySetup {
    /// Whether a group of so many ranks reduces 16 bits.
    pub(crate) fn rounds(&self, group_size: usize) -> bool {
        let sums_integers = self.levels.as_ref().is_some_and(|levels| levels.gradient_messages.is_some());
        self.reduce_dtype != DType::F32 && group_size > 1 && !sums_integers
    }

    /// What a shard's sum of gradients is kept in: f32 where several are added.
    pub(crate) fn shard_dtype(&self, outline: &Outline) -> DType {
        let is_summed = outline.zero_stage >= ZeroStage::Two && outline.num_microbatches > 1;
        if is_summed || !self.rounds(self.num_shards) { DType::F32 } else { self.reduce_dtype }
    }

    /// Bytes of memory of replicas that are mapped for a buffer that they reduce.
    pub(crate) fn mapped_of_replicas(&self, num_bytes: usize) -> usize {
        if self.replicas_share_memory { peer_bytes(self.num_replicas, num_bytes) } else { 0 }
    }

    /// Elements on the device.
    pub(crate) fn elements_on_device(&self, len: usize, dtype: DType) -> usize {
        (len * dtype.size()).next_multiple_of(self.alignment)
    }

    /// Whether a class is worked with elsewhere than on the device; activations never are.
    pub(crate) fn is_away(&self, class: StateClass) -> bool {
        self.places.tier(class) != Tier::Device
    }

    /// f32 elements on the device.
    pub(crate) fn on_device(&self, len: usize) -> usize {
        self.elements_on_device(len, DType::F32)
    }
}

/// Bytes of the buffers of peers of which a rank reads its part.
pub(crate) fn peer_bytes(group_size: usize, num_bytes: usize) -> usize {
    num_bytes.div_ceil(group_size) * (group_size - 1)
}

#[cfg(test)]
impl MemorySetup {
    /// A model without parameters on one rank, whose units' passes take this; the first and the last unit read a tensor of
    /// `token_bytes` each.
    pub(crate) fn of_passes(passes: &[UnitPasses], token_bytes: usize) -> Self {
        let unit = |&passes: &UnitPasses| UnitMemory { passes, ..UnitMemory::default() };
        MemorySetup {
            units: passes.iter().map(unit).collect(),
            tied: None,
            batch: [0, passes.len() - 1]
                .map(|unit| BatchMemory { bytes: token_bytes, readers: vec![unit] })
                .into(),
            fixed: CategoryBytes::default(),
            num_shards: 1,
            num_replicas: 1,
            levels: None,
            shards_share_memory: false,
            replicas_share_memory: false,
            gather_dtype: DType::F32,
            reduce_dtype: DType::F32,
            fusion_bytes: 0,
            places: Offload::default(),
            disk_chunk_bytes: 1,
            disk_write_bytes: 0,
            adds_in_place: false,
            alignment: 64,
        }
    }
}
