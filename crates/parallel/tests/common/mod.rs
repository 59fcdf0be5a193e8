//! A small model in training.
#![allow(dead_code, unreachable_pub)] // Each test binary uses a part of it.

use trireme_comm::{Compression, Group};
use trireme_model::{Batch, Model, ModelConfig};
use trireme_optim::{AdamWSettings, LossScaling, Optimizer, OptimizerKind, OptimizerOptions};
use trireme_parallel::{Determinism, Executor, ExecutorOptions, GradNorm, StepOutcome, StepPlan};
use trireme_schedule::single;
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
    let device = Device::cpu(DeviceOptions { num_threads, ..DeviceOptions::default() }).unwrap();
    let model = Model::new(config.clone(), &device).unwrap();
    let parameters = model.initial_parameters(&device, 1).unwrap();
    let kind = OptimizerKind::AdamW(AdamWSettings { beta1: 0.9, beta2: 0.95, epsilon: 1e-8 });
    let adamw = OptimizerOptions { weight_decay: 0.1, ..OptimizerOptions::new(kind) };
    let optimizer = Optimizer::new(&adamw, model.table(), &model.table().shards(0, 1), &device).unwrap();
    let program = single::program(model.num_units(), accumulation);
    Executor::new(model, parameters, optimizer, group.into(), &device, program, options).unwrap()
}

/// This rank's share of `num_microbatches` random microbatches of a step.
pub fn batches(executor: &Executor, num_microbatches: usize, step: u64) -> Vec<Batch> {
    let per_rank = num_microbatches / executor.group().world_size();
    let first = executor.group().rank().0 * per_rank;
    let vocab_size = executor.model().config().vocab_size;
    let batch = |index| random_batch(executor.device(), SHAPE, vocab_size, step, index);
    (first..first + per_rank).map(batch).collect()
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

pub fn parameter_bits(executor: &Executor) -> Vec<u32> {
    let flat = |unit| executor.parameters().flat(unit).f32s().to_vec();
    (0..executor.model().num_units()).flat_map(flat).map(f32::to_bits).collect()
}
