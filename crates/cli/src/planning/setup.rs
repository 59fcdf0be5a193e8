//! What the planner is told, from what runs tell of themselves.

use anyhow::Result;
use std::ops::Range;
use trireme_base::{Category, DType};
use trireme_comm::Group;
use trireme_model::Model;
use trireme_optim::{Optimizer, OptimizerOptions, ShardOps, StepSettings};
use trireme_parallel::{Determinism, ExecutorOptions, OffloadOptions};
use trireme_planner::{CategoryBytes, MemorySetup, StepExchange, UnitMemory};
use trireme_schedule::ZeroStage;
use trireme_schedule::lowering::Offload;
use trireme_tensor::{Device, DeviceError, Fp8State, LEAVES};

/// How the workers are arranged, as far as the memory of one of them depends on it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    pub(crate) num_shards: usize,
    pub(crate) num_replicas: usize,
    /// This worker's shard.
    pub(crate) shard: usize,
    /// Whether all workers share memory.
    pub(crate) shares_memory: bool,
    /// Workers of a host that share memory; 1 if none do.
    pub(crate) num_sharing: usize,
}

impl Layout {
    /// What the group takes that gradients are reduced by.
    fn group_bytes(&self, zero_stage: ZeroStage) -> usize {
        let size = if zero_stage == ZeroStage::Zero { self.num_replicas } else { self.num_shards };
        match size.min(self.num_sharing) {
            0 | 1 => 0,
            num_ranks => Group::fixed_bytes_of(num_ranks),
        }
    }
}

/// The setup of `model` on one worker. `device` is the model's, and one that only counts: passes and updates run on it once.
pub(crate) fn memory_setup(
    model: &Model,
    device: &Device,
    options: &ExecutorOptions,
    optimizer: &OptimizerOptions,
    places: Offload,
    layout: Layout,
) -> Result<MemorySetup> {
    let table = model.table();
    let parameters = device.memory().usage(Category::Parameters).current;
    let fp8 = options.fp8.map(|recipe| Fp8State::new(recipe, model.linear_layers()));
    let shape = (options.local_batch_size, options.seq_len);
    let scales = fp8.as_ref().map(Fp8State::scales);
    let (sizes, token_bytes) = model.sizes(device, options.precision, scales, shape)?;
    let parts = table.shards(layout.shard, layout.num_shards);
    let mut optimizer = Optimizer::new(optimizer, table, &parts, device)?;
    let mut units = Vec::new();
    for (index, (info, sizes)) in table.units().iter().zip(&sizes).enumerate() {
        let mut optimizer_bytes = 0;
        optimizer.for_each_memory(index, |tensor| {
            optimizer_bytes += tensor.num_bytes().next_multiple_of(Device::ALIGNMENT)
        });
        let (step_scratch, step_exchanges) = update(&mut optimizer, index, parts[index].len(), device)?;
        units.push(UnitMemory {
            len: info.num_elements,
            padded_len: info.padded_len(),
            shard_len: parts[index].len(),
            passes: *sizes,
            optimizer_bytes,
            step_scratch,
            step_exchanges,
        });
    }
    let mut fixed = [0; Category::ALL.len()];
    fixed[Category::Parameters as usize] = parameters;
    fixed[Category::Communication as usize] = layout.group_bytes(options.sharding.zero_stage);
    Ok(MemorySetup {
        units,
        token_bytes,
        fixed: CategoryBytes::new(fixed),
        num_shards: layout.num_shards,
        num_replicas: layout.num_replicas,
        shares_memory: layout.shares_memory,
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
