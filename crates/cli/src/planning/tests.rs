//! Predictions against what real steps take.

use super::setup::{Layout, memory_setup};
use trireme_base::Category;
use trireme_comm::Compression;
use trireme_model::{Batch, Model, ModelConfig};
use trireme_optim::{
    AdamWSettings, LossScaling, Optimizer, OptimizerKind, OptimizerOptions, ParameterGroup, StateDType,
};
use trireme_parallel::{
    DataParallelRanks, Determinism, Executor, ExecutorOptions, GradNorm, OffloadOptions, StepPlan,
};
use trireme_planner::{Prediction, predict};
use trireme_schedule::lowering::{Sharding, recompute, shard};
use trireme_schedule::{Keep, Program, ZeroStage, single};
use trireme_tensor::{Device, DeviceOptions, MemoryCounter, Precision};
use trireme_testkit::{random_batch, run_ranks, small_models};

const NUM_THREADS: usize = 2;

const OPTIONS: ExecutorOptions = ExecutorOptions {
    precision: Precision::F32,
    fp8: None,
    reduce_dtype: Precision::F32,
    fusion_bytes: 60 << 10,
    sharding: Sharding { zero_stage: ZeroStage::Zero, prefetch: 1, keep_after_forward: false },
    compression: Compression::none(),
    seed: 0,
    loss_scaling: LossScaling::Off,
    determinism: Determinism::Layout,
    local_batch_size: 2,
    seq_len: 17,
};

fn adamw() -> OptimizerOptions {
    OptimizerOptions {
        kind: OptimizerKind::AdamW(AdamWSettings { beta1: 0.9, beta2: 0.95, epsilon: 1e-8 }),
        weight_decay: 0.1,
        decay_norms_and_biases: false,
        groups: Vec::<ParameterGroup>::new(),
        state_dtype: StateDType::F32,
    }
}

/// A model of some hundred thousand parameters, in which no size is a power of two.
fn medium_model() -> ModelConfig {
    let text = r#"{"model_type": "llama", "vocab_size": 2500, "hidden_size": 72, "intermediate_size": 200,
        "num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 12,
        "max_position_embeddings": 96, "tie_word_embeddings": false}"#;
    ModelConfig::from_json(text).unwrap()
}

#[derive(Debug, Clone)]
struct Case {
    options: ExecutorOptions,
    optimizer: OptimizerOptions,
    num_microbatches: usize,
    num_shards: usize,
    keep: Keep,
}

impl Case {
    fn program(&self, model: &Model) -> Program {
        let num_units = model.num_units();
        let keep = |unit: usize| match self.keep {
            _ if unit == 0 || unit + 1 == num_units => Keep::All,
            Keep::Nothing if unit % 2 == 1 => Keep::Input,
            keep => keep,
        };
        let keeps: Vec<Keep> = (0..num_units).map(keep).collect();
        let program = single::program(num_units, self.num_microbatches, &model.ties());
        shard(recompute(program, &keeps), self.options.sharding)
    }

    fn predict(&self, config: &ModelConfig, world_size: usize, rank: usize) -> (Prediction, Program) {
        let device_options = DeviceOptions { num_threads: NUM_THREADS, ..DeviceOptions::default() };
        let device = Device::counting(device_options).unwrap();
        let model = Model::new(config.clone(), &device).unwrap();
        let layout = Layout {
            num_shards: self.num_shards,
            num_replicas: world_size / self.num_shards,
            shard: rank % self.num_shards,
            shares_memory: false,
            num_sharing: 1,
        };
        let setup = memory_setup(&model, &device, &self.options, &self.optimizer, layout).unwrap();
        let program = self.program(&model);
        (predict(&setup, &program), program)
    }

    /// Takes a few steps; what they took.
    fn check(&self, config: &ModelConfig, world_size: usize) {
        run_ranks(world_size, |group| {
            let rank = group.rank().0;
            let options = DeviceOptions { num_threads: NUM_THREADS, ..DeviceOptions::default() };
            let device = Device::cpu(options).unwrap();
            let model = Model::new(config.clone(), &device).unwrap();
            let ranks = DataParallelRanks::new(group, self.num_shards).unwrap();
            let parts = ranks.parts(model.table());
            let optimizer = Optimizer::new(&self.optimizer, model.table(), &parts, &device).unwrap();
            let program = self.program(&model);
            let mut executor = Executor::new(
                model,
                optimizer,
                ranks,
                &device,
                program,
                self.options,
                &OffloadOptions::none(&device),
            )
            .unwrap();
            executor.initialize(1).unwrap();
            for step in 1..=3 {
                let shape = (self.options.local_batch_size, self.options.seq_len);
                let batch = |index| random_batch(&device, shape, config.vocab_size, step, index);
                let batches: Vec<Batch> = (0..self.num_microbatches).map(batch).collect();
                let plan = StepPlan { step, lr: 1e-3, grad_norm: GradNorm::Measure };
                executor.run(plan, &mut batches.into_iter()).unwrap();
            }
            self.compare(config, world_size, rank, device.memory());
        });
    }

    fn compare(&self, config: &ModelConfig, world_size: usize, rank: usize, memory: &MemoryCounter) {
        let (predicted, program) = self.predict(config, world_size, rank);
        for category in Category::ALL {
            let found = (category, predicted.peaks.get(category));
            assert_eq!(found, (category, memory.usage(category).peak), "rank {rank} of {self:?}");
        }
        let moment = predicted.moment(&program);
        assert_eq!(predicted.total(), memory.total().peak, "rank {rank} of {self:?}, {moment}");
    }
}

const STAGES: [ZeroStage; 4] = ZeroStage::ALL;

#[test]
fn every_stage_and_every_keep() {
    let [gpt2, llama] = small_models();
    for (config, precision) in
        [(gpt2, Precision::F32), (llama, Precision::Bf16), (medium_model(), Precision::F32)]
    {
        for (zero_stage, keep) in STAGES.into_iter().flat_map(|stage| Keep::ALL.map(|keep| (stage, keep))) {
            let sharding = Sharding { zero_stage, ..OPTIONS.sharding };
            let options = ExecutorOptions { precision, sharding, ..OPTIONS };
            let num_shards = if zero_stage == ZeroStage::Zero { 1 } else { 2 };
            let case = Case { options, optimizer: adamw(), num_microbatches: 2, num_shards, keep };
            case.check(&config, 2);
        }
    }
}

#[test]
fn every_layout() {
    let config = medium_model();
    for zero_stage in STAGES {
        for (world_size, num_shards) in [(1, 1), (2, 2), (2, 1), (4, 4), (4, 2)] {
            let num_shards = if zero_stage == ZeroStage::Zero { 1 } else { num_shards };
            for (num_microbatches, determinism) in
                [(1, Determinism::Layout), (3, Determinism::Run), (4, Determinism::Layout)]
            {
                for reduce_dtype in [Precision::F32, Precision::Bf16] {
                    let sharding = Sharding { zero_stage, ..OPTIONS.sharding };
                    let options = ExecutorOptions {
                        precision: reduce_dtype,
                        reduce_dtype,
                        sharding,
                        determinism,
                        seq_len: 40,
                        ..OPTIONS
                    };
                    let keep = Keep::Products;
                    let optimizer = adamw();
                    let case = Case { options, optimizer, num_microbatches, num_shards, keep };
                    case.check(&config, world_size);
                }
            }
        }
    }
}
