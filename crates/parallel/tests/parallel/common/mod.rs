//! Helpers that train a small model.
use std::path::Path;
use trireme_comm::Group;
use trireme_model::{Batch, Model, ModelConfig, ModelError, ModelProfile, TensorSpec, token_specs};
use trireme_optim::{LossScaling, OptimizerName, OptimizerOptions, OptimizerSettings};
use trireme_parallel::{
    Degrees, Executor, ExecutorOptions, ExecutorSetup, GradNorm, OffloadOptions, RankGrid, StepOutcome,
    StepPlan, chain,
};
use trireme_schedule::lowering::{apply_layout, recompute};
use trireme_schedule::pipeline::{Costs, ScheduleKind, Sizes, StageCosts, generate, programs};
use trireme_schedule::{Keep, Program, StateLayout, UnitChain, single};
use trireme_swap::SwapOptions;
use trireme_tensor::{BackendKind, Device, DeviceOptions, ParameterTable};
use trireme_testkit::{classifier_batch, classifier_specs, random_batch, run_ranks};

pub(crate) const SHAPE: (usize, usize) = (2, 17);
pub(crate) const STEPS: u64 = 3;
/// Number of steps of a program that does not drain between updates.
pub(crate) const ASYNCHRONOUS_STEPS: usize = 6;

/// Options with f32 and sums in the canonical order.
pub(crate) const OPTIONS: ExecutorOptions = ExecutorOptions {
    // The gradients of a small model fill one fused message and begin the next.
    fusion_bytes: 60 << 10,
    ..ExecutorOptions::PLAIN
};

/// An optimizer with its settings.
pub(crate) type NamedOptimizer = (OptimizerName, OptimizerSettings);

pub(crate) const DEFAULT: OptimizerSettings = OptimizerSettings::DEFAULT;

pub(crate) const ADAMW: NamedOptimizer = (OptimizerName::AdamW, DEFAULT);

/// Dynamic loss scaling that starts at `initial` and does not grow within a test.
pub(crate) fn dynamic(initial: u32) -> LossScaling {
    LossScaling::Dynamic { initial, growth_interval: 1000 }
}

pub(crate) fn executor(
    config: &ModelConfig,
    group: Group,
    num_threads: usize,
    accumulation: usize,
    options: ExecutorOptions,
) -> Executor {
    executor_with_layout(config, group, num_threads, accumulation, &Layout { options, ..Layout::default() })
}

/// The options, degrees and state layout of an executor.
#[derive(Clone)]
pub(crate) struct Layout<'a> {
    pub(crate) options: ExecutorOptions,
    pub(crate) optimizer: NamedOptimizer,
    pub(crate) weight_decay: f32,
    /// Replaces `optimizer` and `weight_decay` if set.
    pub(crate) optimizer_options: Option<OptimizerOptions>,
    /// Number of ranks that shard a replica.
    pub(crate) num_shards: usize,
    /// The degrees of the context axis and of the groups that exchange positions for heads: [`Degrees::context`] and [`Degrees::heads`].
    pub(crate) context: (usize, usize),
    /// Number of ranks of the tensor axis.
    pub(crate) tensor: usize,
    /// Number of ranks with different experts.
    pub(crate) experts: usize,
    /// The schedule and the stages, if there is a pipeline.
    pub(crate) pipeline: Option<Pipeline>,
    /// The activations that each unit keeps; if empty, every unit keeps all.
    pub(crate) keeps: &'a [Keep],
    /// The layout of state on the ranks.
    pub(crate) state: StateLayout,
    pub(crate) folder: &'a Path,
    pub(crate) swap: SwapOptions,
    pub(crate) backend: BackendKind,
}

/// A pipeline schedule and its sizes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pipeline {
    pub(crate) kind: ScheduleKind,
    pub(crate) num_ranks: usize,
    pub(crate) stages_per_rank: usize,
}

impl Pipeline {
    /// Returns the first unit of each stage except the first.
    fn even_splits(&self, num_units: usize) -> Vec<usize> {
        let num_stages = self.num_ranks * self.stages_per_rank;
        (1..num_stages).map(|stage| stage * num_units / num_stages).collect()
    }

    fn program(&self, chain: &UnitChain, splits: &[usize], num_microbatches: usize, rank: usize) -> Program {
        let Pipeline { kind, num_ranks, stages_per_rank } = *self;
        let num_stages = num_ranks * stages_per_rank;
        let num_steps = if kind.is_synchronous() { 1 } else { ASYNCHRONOUS_STEPS };
        let sizes = Sizes { num_ranks, num_microbatches, stages_per_rank, num_steps };
        let costs = Costs::equal(num_stages, StageCosts::of(1, 1, 1)).unwrap();
        let schedule = generate(kind, sizes, &costs, None).unwrap();
        let bounds = [&[0], splits, &[chain.num_units]].concat();
        let units: Vec<_> = bounds.windows(2).map(|pair| pair[0]..pair[1]).collect();
        programs(&schedule, &costs, &units, chain).swap_remove(rank)
    }
}

impl Default for Layout<'_> {
    fn default() -> Self {
        Layout {
            options: OPTIONS,
            optimizer: ADAMW,
            weight_decay: 0.1,
            optimizer_options: None,
            num_shards: 1,
            context: (1, 1),
            tensor: 1,
            experts: 1,
            pipeline: None,
            keeps: &[],
            state: StateLayout::UNSHARDED,
            folder: Path::new("/nonexistent"),
            swap: SwapOptions::default(),
            backend: BackendKind::Cpu,
        }
    }
}

pub(crate) fn executor_with_layout(
    config: &ModelConfig,
    group: Group,
    num_threads: usize,
    accumulation: usize,
    layout: &Layout<'_>,
) -> Executor {
    let build = |device: &Device, table| config.build_into(table, config.max_position_embeddings, device);
    executor_of_model(&build, &token_specs(SHAPE.0, SHAPE.1), group, num_threads, accumulation, layout)
}

/// A function that builds a model.
pub(crate) type Build<'a> = &'a dyn Fn(&Device, ParameterTable) -> Result<Model, ModelError>;

/// Creates an executor of the model that `build` returns, for microbatches with these tensors.
pub(crate) fn executor_of_model(
    build: Build<'_>,
    specs: &[TensorSpec],
    group: Group,
    num_threads: usize,
    accumulation: usize,
    layout: &Layout<'_>,
) -> Executor {
    let device_options = DeviceOptions { num_threads, backend: layout.backend, ..DeviceOptions::default() };
    let device = Device::open(device_options).unwrap();
    let Layout { options, .. } = layout;
    let (pipeline, shards) = (layout.pipeline.map_or(1, |pipeline| pipeline.num_ranks), layout.num_shards);
    let ((context, heads), tensor, experts) = (layout.context, layout.tensor, layout.experts);
    let degrees = Degrees { pipeline, shards, context, heads, tensor, experts };
    let ranks = RankGrid::new(group, degrees).unwrap();
    let place = ranks.context_rank();
    let specs: Vec<TensorSpec> = specs.iter().map(|spec| spec.for_context_rank(place)).collect();
    let build = |device: &Device| Model::build_at(ranks.model_rank(), device, build);
    let profile = ModelProfile::of(build, device_options, options.pass_options(place), &specs).unwrap();
    let model = build(&device).unwrap();
    let chain = chain(model.table(), &profile, layout.options.determinism);
    let program = match layout.pipeline {
        Some(pipeline) => {
            let splits = pipeline.even_splits(model.num_units());
            pipeline.program(&chain, &splits, accumulation, ranks.pipeline().rank().0)
        }
        None => single::program(&chain, accumulation),
    };
    let offload = OffloadOptions {
        host: device.host().unwrap(),
        folder: layout.folder.to_owned(),
        swap: layout.swap.clone(),
    };
    let (name, settings) = layout.optimizer;
    let plain =
        OptimizerOptions { settings, weight_decay: layout.weight_decay, ..OptimizerOptions::new(name) };
    let optimizer = &layout.optimizer_options.clone().unwrap_or(plain);
    let program = lowered(program, layout);
    let (options, offload, device) = (layout.options, &offload, &device);
    let setup = ExecutorSetup { model, profile, optimizer, ranks, device, program, options, offload };
    let mut executor = Executor::new(setup).unwrap();
    executor.initialize(1).unwrap();
    executor
}

fn lowered(program: Program, layout: &Layout<'_>) -> Program {
    let program = if layout.keeps.is_empty() { program } else { recompute(program, layout.keeps) };
    apply_layout(program, layout.state)
}

/// Returns the executor's program with stages that begin at `splits`.
pub(crate) fn with_stages_at(executor: &Executor, splits: &[usize], layout: &Layout<'_>) -> Program {
    let (rank, num_microbatches) =
        (executor.ranks().pipeline().rank().0, executor.program().header.num_microbatches);
    let pipeline = layout.pipeline.expect("a pipeline is cut");
    lowered(pipeline.program(&executor.program().header.chain, splits, num_microbatches, rank), layout)
}

/// Returns the vocabulary size of an executor's model.
pub(crate) fn vocab_size(executor: &Executor) -> usize {
    executor.model().table().parameters()[0].full_shape.rows()
}

/// Returns this rank's share of `num_microbatches` random microbatches of a step.
pub(crate) fn batches(executor: &Executor, num_microbatches: usize, step: u64) -> Vec<Batch> {
    let per_rank = num_microbatches / executor.ranks().sample_rank().degree;
    let vocab_size = vocab_size(executor);
    let place = |index| executor.global_microbatch(index);
    let batch = |index| random_batch(executor.device(), SHAPE, vocab_size, step, place(index));
    (0..per_rank).map(batch).collect()
}

/// Trains a few steps. Returns losses, norms and metrics, and this rank's shards of all parameters, as bits. `num_microbatches` is the
/// number of microbatches of all ranks.
pub(crate) fn train(executor: Executor, num_microbatches: usize) -> (Vec<[u64; 2]>, Vec<u32>) {
    train_on(executor, &|executor, step| batches(executor, num_microbatches, step))
}

/// As [`train`], on the batches that `batches` returns: this rank's microbatches of a step.
pub(crate) fn train_on(
    mut executor: Executor,
    batches: &dyn Fn(&Executor, u64) -> Vec<Batch>,
) -> (Vec<[u64; 2]>, Vec<u32>) {
    let mut found = Vec::new();
    for step in 1..=STEPS {
        let batches = batches(&executor, step);
        let plan = StepPlan { step, lr: 1e-2, grad_norm: GradNorm::Clip(0.5), has_loss: true };
        let outcome: StepOutcome = executor.run(plan, &mut batches.into_iter()).unwrap();
        assert_eq!(outcome.skipped, None, "step {step}");
        found.push([outcome.loss.to_bits(), outcome.grad_norm.unwrap().to_bits()]);
        found.extend(executor.metrics(0).map(|(_, value)| [value.to_bits(), 0]));
    }
    executor.check_replicas().unwrap();
    (found, parameter_bits(&executor))
}

/// Trains a model that reads the batches of a classifier. Returns losses, norms and metrics, and the weights of all ranks.
pub(crate) fn train_classifier(
    build: fn(&Device, ParameterTable) -> Result<Model, ModelError>,
    num_samples: usize,
    layout: &Layout<'_>,
    world_size: usize,
    accumulation: usize,
) -> (Vec<[u64; 2]>, Vec<u32>) {
    let batches = |executor: &Executor, step: u64| -> Vec<Batch> {
        let place = |index| executor.global_microbatch(index);
        (0..accumulation)
            .map(|index| classifier_batch(executor.device(), num_samples, step, place(index)))
            .collect()
    };
    let found = run_ranks(world_size, |group| {
        let specs = classifier_specs(num_samples);
        train_on(executor_of_model(&build, &specs, group, 1, accumulation, layout), &batches)
    });
    assert!(found.iter().all(|(steps, _)| *steps == found[0].0), "ranks agree");
    (found[0].0.clone(), found.into_iter().flat_map(|(_, weights)| weights).collect())
}

/// Returns the parameters that this rank updates, as bits.
pub(crate) fn parameter_bits(executor: &Executor) -> Vec<u32> {
    let flat = |unit| shard_values(executor, unit);
    (0..executor.model().num_units()).flat_map(flat).map(f32::to_bits).collect()
}

/// Returns this rank's shard of a unit's parameters.
pub(crate) fn shard_values(executor: &Executor, unit: usize) -> Vec<f32> {
    executor.shard_device().read(executor.shard(unit)).unwrap()
}

/// Lets `change` change this rank's shard of a unit's parameters.
pub(crate) fn change_shard(executor: &mut Executor, unit: usize, change: impl FnOnce(&mut [f32])) {
    let mut values = shard_values(executor, unit);
    change(&mut values);
    let device = executor.shard_device().clone();
    device.upload(&values, executor.shard_mut(unit));
}
