//! A small model in training.
#![allow(dead_code, unreachable_pub)] // Each test binary uses a part of it.

use trireme_comm::{Compression, Group};
use trireme_model::{Batch, Model, ModelConfig};
use trireme_optim::{AdamWSettings, LossScaling, Optimizer, OptimizerKind, OptimizerOptions};
use trireme_parallel::{
    DataParallelRanks, Determinism, Executor, ExecutorOptions, GradNorm, StepOutcome, StepPlan,
};
use trireme_schedule::lowering::{Sharding, recompute, shard};
use trireme_schedule::{Keep, ZeroStage, single};
use trireme_tensor::{Device, DeviceOptions, Precision};
use trireme_testkit::random_batch;

pub const SHAPE: (usize, usize) = (2, 17);
pub const STEPS: u64 = 3;

/// In f32, summed in the canonical order.
pub const OPTIONS: ExecutorOptions = ExecutorOptions {
    precision: Precision::F32,
    fp8: None,
    reduce_dtype: Precision::F32,
    // The units of a small model fill one batch and begin the next.
    fusion_bytes: 60 << 10,
    sharding: Sharding { zero_stage: ZeroStage::Zero, prefetch: 1, keep_after_forward: false },
    compression: Compression::none(),
    seed: 0,
    loss_scaling: LossScaling::Off,
    determinism: Determinism::Layout,
    local_batch_size: SHAPE.0,
    seq_len: SHAPE.1,
};

/// A scale that starts here and does not grow within a test.
pub fn dynamic(initial: u32) -> LossScaling {
    LossScaling::Dynamic { initial, growth_interval: 1000 }
}

pub fn executor(
    config: &ModelConfig,
    group: Group,
    num_threads: usize,
    accumulation: usize,
    options: ExecutorOptions,
) -> Executor {
    sharded_executor(config, group, num_threads, accumulation, options, &[], 1)
}

/// As [`executor`], with recomputation of what units do not keep (all keep all if there is no choice), and `num_shards` ranks
/// of a replica, which share out what `options` say.
pub fn sharded_executor(
    config: &ModelConfig,
    group: Group,
    num_threads: usize,
    accumulation: usize,
    options: ExecutorOptions,
    keeps: &[Keep],
    num_shards: usize,
) -> Executor {
    let device = Device::cpu(DeviceOptions { num_threads, ..DeviceOptions::default() }).unwrap();
    let model = Model::new(config.clone(), &device).unwrap();
    let ranks = DataParallelRanks::new(group, num_shards).unwrap();
    let kind = OptimizerKind::AdamW(AdamWSettings { beta1: 0.9, beta2: 0.95, epsilon: 1e-8 });
    let adamw = OptimizerOptions { weight_decay: 0.1, ..OptimizerOptions::new(kind) };
    let optimizer = Optimizer::new(&adamw, model.table(), &ranks.parts(model.table()), &device).unwrap();
    let program = single::program(model.num_units(), accumulation, &model.ties());
    let program = if keeps.is_empty() { program } else { recompute(program, keeps) };
    let program = shard(program, options.sharding);
    let mut executor = Executor::new(model, optimizer, ranks, &device, program, options).unwrap();
    executor.initialize(1).unwrap();
    executor
}

/// This rank's share of `num_microbatches` random microbatches of a step.
pub fn batches(executor: &Executor, num_microbatches: usize, step: u64) -> Vec<Batch> {
    let per_rank = num_microbatches / executor.group().world_size();
    let vocab_size = executor.model().config().vocab_size;
    let place = |index| executor.global_microbatch(index);
    let batch = |index| random_batch(executor.device(), SHAPE, vocab_size, step, place(index));
    (0..per_rank).map(batch).collect()
}

/// Losses, norms and all parameters as bits after a few steps over the same global batches.
pub fn train(mut executor: Executor, num_microbatches: usize) -> (Vec<[u64; 2]>, Vec<u32>) {
    let mut found = Vec::new();
    for step in 1..=STEPS {
        let batches = batches(&executor, num_microbatches, step);
        let plan = StepPlan { step, lr: 1e-2, grad_norm: GradNorm::Clip(0.5) };
        let outcome: StepOutcome = executor.run(plan, &mut batches.into_iter()).unwrap();
        assert_eq!(outcome.skipped, None, "step {step}");
        found.push([outcome.loss.to_bits(), outcome.grad_norm.unwrap().to_bits()]);
    }
    executor.check_replicas().unwrap();
    (found, parameter_bits(&executor))
}

/// What this rank steps, as bits.
pub fn parameter_bits(executor: &Executor) -> Vec<u32> {
    let flat = |unit| executor.shard(unit).f32s().to_vec();
    (0..executor.model().num_units()).flat_map(flat).map(f32::to_bits).collect()
}
