//! Parameters that are stored in bf16 and updated with stochastic rounding.

use crate::common::{DEFAULT, Layout, OPTIONS, Pipeline, STEPS, batches, executor_with_layout};
use crate::expert_parallel::models as expert_models;
use trireme_model::ModelConfig;
use trireme_optim::OptimizerName;
use trireme_parallel::{Executor, ExecutorOptions, GradNorm, StepPlan};
use trireme_schedule::pipeline::ScheduleKind;
use trireme_schedule::{StateClass, StateLayout, Tier};
use trireme_tensor::{BackendKind, Category, DetachedOptions, Precision};
use trireme_testkit::{run_ranks, small_models};

const BF16: ExecutorOptions = ExecutorOptions { precision: Precision::Bf16, ..OPTIONS };
const BF16_PARAMETERS: ExecutorOptions = ExecutorOptions { bf16_parameters: true, ..BF16 };

/// Number of microbatches of all data-parallel ranks in a step.
const NUM_MICROBATCHES: usize = 4;

/// Results of rank 0.
struct Found {
    losses: Vec<f64>,
    /// All weights, before the first step and after the last one.
    weights: [Vec<f32>; 2],
    /// Peak memory of parameters and optimizer state.
    num_bytes: usize,
}

impl Found {
    fn results(&self) -> (&[f64], &[Vec<f32>; 2]) {
        (&self.losses, &self.weights)
    }

    /// Returns the sum of all updates of each weight.
    fn updates(&self) -> impl Iterator<Item = f64> {
        let [before, after] = &self.weights;
        before.iter().zip(after).map(|(before, after)| f64::from(*after) - f64::from(*before))
    }
}

fn weights(executor: &mut Executor) -> Vec<f32> {
    let weights = executor.gather_parameters().unwrap();
    let flat = |unit| weights.as_ref().map_or_else(Vec::new, |all| all.values(unit).unwrap());
    (0..executor.model().num_units()).flat_map(flat).collect()
}

fn run(config: &ModelConfig, layout: &Layout<'_>, world_size: usize, lr: f64) -> Found {
    let num_data = world_size / layout.tensor / layout.pipeline.map_or(1, |pipeline| pipeline.num_ranks);
    let results = run_ranks(world_size, |group| {
        let mut executor = executor_with_layout(config, group, 1, NUM_MICROBATCHES / num_data, layout);
        let (before, mut losses) = (weights(&mut executor), Vec::new());
        for step in 1..=STEPS {
            let batches = batches(&executor, NUM_MICROBATCHES, step);
            let plan = StepPlan { step, lr, grad_norm: GradNorm::Measure, has_loss: true };
            losses.push(executor.run(plan, &mut batches.into_iter()).unwrap().loss);
        }
        executor.check_replicas().unwrap();
        let memory = executor.device().memory();
        let num_bytes = memory.usage(Category::Parameters).peak + memory.usage(Category::Optimizer).peak;
        Found { losses, weights: [before, weights(&mut executor)], num_bytes }
    });
    results.into_iter().next().expect("rank 0")
}

#[test]
fn every_layout_has_the_same_bits() {
    let folder = tempfile::tempdir().unwrap();
    let plain = Layout { options: BF16_PARAMETERS, folder: folder.path(), ..Layout::default() };
    let sharded = |stage, num_shards| Layout { num_shards, state: StateLayout::zero(stage), ..plain.clone() };
    let zero_3 = StateLayout::zero(3);
    let on_disk =
        zero_3.with_tier(StateClass::Optimizer, Tier::Disk).with_tier(StateClass::Parameters, Tier::Host);
    let pipeline = Pipeline { kind: ScheduleKind::OneFOneB, num_ranks: 2, stages_per_rank: 1 };
    let layouts = [
        (2, plain.clone()),
        (4, plain.clone()),
        (4, Layout { state: StateLayout { updates_early: true, ..StateLayout::UNSHARDED }, ..plain.clone() }),
        (2, sharded(1, 2)),
        (4, sharded(2, 2)),
        (2, sharded(3, 2)),
        (4, sharded(3, 4)),
        (2, Layout { state: on_disk, ..sharded(3, 2) }),
        (2, Layout { pipeline: Some(pipeline), ..plain.clone() }),
        (2, Layout { backend: BackendKind::Detached(DetachedOptions::default()), ..sharded(3, 2) }),
    ];
    for config in small_models() {
        let expected = run(&config, &plain, 1, 1e-2);
        // bf16 represents every weight.
        assert!(expected.weights.iter().flatten().all(|weight| weight.to_bits() & 0xffff == 0));
        for (world_size, layout) in &layouts {
            let found = run(&config, layout, *world_size, 1e-2);
            assert!(
                found.results() == expected.results(),
                "{}: {} on {world_size}",
                config.family.name(),
                layout.state
            );
        }
    }
}

#[test]
fn every_optimizer_updates_them() {
    let config = &small_models()[0];
    for name in [OptimizerName::Lamb, OptimizerName::Adafactor, OptimizerName::Muon, OptimizerName::Lion] {
        let layout = Layout { options: BF16_PARAMETERS, optimizer: (name, DEFAULT), ..Layout::default() };
        let expected = run(config, &layout, 1, 1e-2);
        let sharded = Layout { num_shards: 2, state: StateLayout::zero(3), ..layout };
        assert!(run(config, &sharded, 2, 1e-2).results() == expected.results(), "{name}");
    }
}

#[test]
fn replicated_parameters_stay_equal_on_the_tensor_and_the_expert_axis() {
    let plain = Layout { options: BF16_PARAMETERS, ..Layout::default() };
    let sharded = |layout| Layout { num_shards: 2, state: StateLayout::zero(3), ..layout };
    // Each run checks its replicas.
    for config in small_models().iter().filter(|config| config.num_heads.is_multiple_of(2)) {
        run(config, &Layout { tensor: 2, ..plain.clone() }, 2, 1e-2);
        run(config, &sharded(Layout { tensor: 2, ..plain.clone() }), 4, 1e-2);
    }
    for config in expert_models() {
        run(&config, &Layout { experts: 2, ..plain.clone() }, 2, 1e-2);
        run(&config, &sharded(Layout { experts: 2, ..plain.clone() }), 4, 1e-2);
    }
}

#[test]
fn they_take_2_bytes_and_small_updates_count_on_average() {
    let config = &small_models()[0];
    let layout = |options, state, num_shards| Layout { options, state, num_shards, ..Layout::default() };
    for (world_size, state, expected) in [
        // Parameters and moments of 4 + 8 bytes, and 2 + 8.
        (1, StateLayout::UNSHARDED, 10.0 / 12.0),
        // Copies in 16 bits, f32 weights and moments, of which two ranks have half each: 2 + 2 + 4 bytes, and 2 + 4.
        (2, StateLayout::zero(1), 6.0 / 8.0),
    ] {
        // Far below half a unit of the last digit of most weights: rounded to nearest, they would not change.
        let lr = 1e-6;
        let exact = run(config, &layout(BF16, state, world_size), world_size, lr);
        let rounded = run(config, &layout(BF16_PARAMETERS, state, world_size), world_size, lr);
        let squares: f64 = exact.updates().map(|update| update * update).sum();
        let products: f64 =
            exact.updates().zip(rounded.updates()).map(|(exact, rounded)| exact * rounded).sum();
        let fraction = products / squares;
        assert!((fraction - 1.0).abs() < 0.2, "{fraction} of the updates");
        let ratio = rounded.num_bytes as f64 / exact.num_bytes as f64;
        assert!((ratio - expected).abs() < 0.02, "{ratio} instead of {expected}");
    }
}
