//! What the planner is told, from what runs tell of themselves.

use anyhow::Result;
use std::ops::Range;
use trireme_base::{Category, DType};
use trireme_comm::{CompressorSizes, Group, Round};
use trireme_model::{Model, Rehearsal};
use trireme_optim::{LossScaling, Optimizer, OptimizerOptions, ShardOps, StepSettings};
use trireme_parallel::{Determinism, ExecutorOptions, OffloadOptions, ZeroPlusPlus, compressor_sizes};
use trireme_planner::{
    BatchMemory, CategoryBytes, CompressionMemory, HostLevels, MemorySetup, StepExchange, TiedLens,
    UnitMemory,
};
use trireme_schedule::lowering::Offload;
use trireme_schedule::{Outline, ZeroStage};
use trireme_tensor::{Device, DeviceError, LEAVES, ParameterTable, Tie};

/// How the workers are arranged, as far as the memory of one of them depends on it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    pub(crate) num_shards: usize,
    pub(crate) num_replicas: usize,
    /// This worker's shard.
    pub(crate) shard: usize,
    /// Workers of a replica on a host; hosts have equally many.
    pub(crate) num_local: usize,
    /// Places in the pipeline; each has all of the above.
    pub(crate) pipeline_degree: usize,
    /// Whether all workers share memory.
    pub(crate) shares_memory: bool,
    /// Workers of a host that share memory; 1 if none do.
    pub(crate) num_sharing: usize,
}

impl Layout {
    /// Whether the workers of a replica share memory.
    fn shards_share_memory(&self) -> bool {
        self.num_sharing > 1 && self.num_local == self.num_shards
    }

    fn num_hosts(&self) -> usize {
        self.num_shards / self.num_local
    }

    /// Whether the workers of a replica are split by hosts.
    fn is_split(&self, options: &ExecutorOptions) -> bool {
        let is_sharded = options.sharding.zero_stage == ZeroStage::Three && self.num_shards > 1;
        is_sharded && options.zero_plus_plus != ZeroPlusPlus::NONE
    }

    /// What the groups take that a worker is in.
    fn group_bytes(&self, options: &ExecutorOptions) -> usize {
        let num_workers = self.num_shards * self.num_replicas;
        if self.num_sharing <= 1 || num_workers * self.pipeline_degree == 1 {
            return 0;
        }
        // How many workers each has, and how many of them on this host.
        let world = (num_workers * self.pipeline_degree, self.num_sharing);
        // Those of a stage are neighbours.
        let pipeline =
            (self.pipeline_degree, (self.num_sharing / num_workers).clamp(1, self.pipeline_degree));
        let data = (num_workers, self.num_sharing.min(num_workers));
        let (shards, num_replicas) = ((self.num_shards, self.num_local), self.num_replicas);
        let near = data.1 / self.num_local;
        let replicas = (num_replicas, near.clamp(1, num_replicas));
        let mut groups = Vec::from([world]);
        groups.extend([pipeline, data].into_iter().filter(|(size, _)| *size < world.0));
        groups.extend([shards, replicas].into_iter().filter(|(size, _)| *size < num_workers));
        if self.is_split(options) {
            let levels = [(self.num_local, self.num_local), (self.num_hosts(), 1)];
            groups.extend(levels.into_iter().filter(|(size, _)| *size < self.num_shards));
        }
        // A worker alone needs no group.
        let groups = groups.into_iter().filter(|(size, _)| *size > 1);
        groups.map(|(_, num_near)| Group::fixed_bytes_of(num_near)).sum()
    }
}

/// The setup of a model on one worker, which holds the units of `outline`. `device` is the model's, and one that only counts: updates
/// run on it once.
pub(crate) fn memory_setup(
    (model, rehearsal): (&Model, &Rehearsal),
    device: &Device,
    options: &ExecutorOptions,
    optimizer: &OptimizerOptions,
    places: Offload,
    (layout, outline): (Layout, &Outline),
) -> Result<MemorySetup> {
    let table = model.table();
    let parameters = device.memory().usage(Category::Parameters).current;
    let mut parts = table.shards(layout.shard, layout.num_shards);
    let elsewhere = parts.iter_mut().enumerate().filter(|(unit, _)| !outline.holds(*unit));
    elsewhere.for_each(|(_, part)| *part = 0..0);
    let mut optimizer = Optimizer::new(optimizer, table, &parts, device)?;
    let mut units = Vec::new();
    for (index, info) in table.units().iter().enumerate() {
        // Messages are as long as what is read and made elsewhere.
        let passes_only = UnitMemory {
            passes: rehearsal.units[index].passes,
            activation_len: rehearsal.activation_words(index),
            gradient_len: rehearsal.gradient_words(index),
            ..UnitMemory::default()
        };
        let mut optimizer_bytes = 0;
        optimizer.for_each_memory(index, |tensor| {
            optimizer_bytes += tensor.num_bytes().next_multiple_of(Device::ALIGNMENT)
        });
        if !outline.holds(index) {
            units.push(UnitMemory { optimizer_bytes, ..passes_only });
            continue;
        }
        let (step_scratch, step_exchanges) = update(&mut optimizer, index, parts[index].len(), device)?;
        units.push(UnitMemory {
            len: info.num_elements,
            padded_len: info.padded_len(),
            shard_len: parts[index].len(),
            optimizer_bytes,
            step_scratch,
            step_exchanges,
            compression: compression(table, index, options, &optimizer, layout)?,
            ..passes_only
        });
    }
    let mut fixed = [0; Category::ALL.len()];
    fixed[Category::Parameters as usize] = parameters;
    fixed[Category::Communication as usize] = layout.group_bytes(options);
    Ok(MemorySetup {
        units,
        batch: rehearsal
            .batch
            .iter()
            .map(|tensor| BatchMemory { bytes: tensor.bytes, readers: tensor.readers.clone() })
            .collect(),
        tied: table.tie().map(|Tie { span, .. }| TiedLens {
            span: span.shape.num_elements(),
            unit: table.units()[span.unit].num_elements,
        }),
        fixed: CategoryBytes::new(fixed),
        num_shards: layout.num_shards,
        num_replicas: layout.num_replicas,
        levels: host_levels(table, options, layout),
        shards_share_memory: layout.shards_share_memory(),
        replicas_share_memory: layout.shares_memory,
        gather_dtype: options.gather_precision().dtype(),
        reduce_dtype: options.reduce_dtype.dtype(),
        fusion_bytes: options.fusion_bytes,
        places,
        disk_chunk_bytes: OffloadOptions::DISK_CHUNK_BYTES,
        disk_write_bytes: OffloadOptions::DISK_WRITE_BYTES,
        adds_in_place: options.determinism == Determinism::Run,
        alignment: Device::ALIGNMENT,
    })
}

/// What the ranks of a replica spare the network between its hosts, if anything.
fn host_levels(table: &ParameterTable, options: &ExecutorOptions, layout: Layout) -> Option<HostLevels> {
    if !layout.is_split(options) {
        return None;
    }
    let (spared, num_hosts) = (options.zero_plus_plus, layout.num_hosts());
    let Layout { num_shards, num_local, .. } = layout;
    let units = || table.units().iter();
    // On one host shards are as near as copies of them would be.
    let has_copies = spared.secondary_shards && num_hosts > 1;
    let copies = || table.shards(layout.shard % num_local, num_local).into_iter().map(|part| part.len());
    Some(HostLevels {
        num_local,
        num_hosts,
        shares_memory: layout.num_sharing > 1,
        parameter_messages: units().map(|unit| spared.parameter_message_bytes(unit, num_shards)).collect(),
        gradient_messages: units().map(|unit| spared.gradient_message_bytes(unit, num_shards)).collect(),
        secondary_lens: has_copies.then(|| copies().collect()),
    })
}

/// What the compressed reduction of a unit's gradient takes, if it is compressed: by ranks that all keep the whole of it.
fn compression(
    table: &ParameterTable,
    unit: usize,
    options: &ExecutorOptions,
    optimizer: &Optimizer,
    layout: Layout,
) -> Result<Option<CompressionMemory>> {
    if options.sharding.zero_stage >= ZeroStage::One {
        return Ok(None);
    }
    let num_ranks = layout.num_replicas;
    let sizes = compressor_sizes(table, unit, &options.compression, num_ranks)?;
    let memory = |sizes: CompressorSizes| {
        let sends_whole = optimizer.exchanges_momentum();
        // A step of momentum that overflows is taken back.
        let is_copied = sends_whole && matches!(options.loss_scaling, LossScaling::Dynamic { .. });
        let copies_bytes = if is_copied { sizes.state_bytes } else { 0 };
        let held = |round: &Round| round.num_bytes() * round.num_messages(num_ranks);
        CompressionMemory {
            compressor_bytes: sizes.state_bytes + sizes.scratch_bytes + copies_bytes,
            messages: sizes.rounds.iter().map(|rounds| rounds.iter().map(held).collect()).collect(),
            sends_whole,
        }
    };
    Ok(sizes.map(memory))
}

/// What an update of a unit takes for a moment, and exchanges.
fn update(
    optimizer: &mut Optimizer,
    unit: usize,
    len: usize,
    device: &Device,
) -> Result<(usize, Vec<StepExchange>)> {
    let vector = || device.empty([len].into(), DType::F32, Category::Parameters);
    let (mut parameters, grads) = (vector()?, vector()?);
    let settings = StepSettings { step: 1, lr: 0.0, grad_scale: 1.0 };
    let mut exchanges = Exchanges(Vec::new());
    device.memory().restart_peaks();
    optimizer.step_unit(device, unit, parameters.view_mut(), grads.view(), settings, &mut exchanges)?;
    let usage = device.memory().usage(Category::Optimizer);
    Ok((usage.peak - usage.current, exchanges.0))
}

/// Notes what an optimizer would exchange.
struct Exchanges(Vec<StepExchange>);

impl ShardOps for Exchanges {
    type Error = DeviceError;

    fn sum(&mut self, values: &mut [f64]) -> Result<(), DeviceError> {
        self.0.push(StepExchange { len: values.len(), element_bytes: size_of::<f64>() });
        Ok(())
    }

    fn gather(&mut self, whole: &mut [f32], _: Range<usize>) -> Result<(), DeviceError> {
        // As long as shards of whole leaves make up.
        let len = whole.len().next_multiple_of(LEAVES);
        self.0.push(StepExchange { len, element_bytes: size_of::<f32>() });
        Ok(())
    }
}
