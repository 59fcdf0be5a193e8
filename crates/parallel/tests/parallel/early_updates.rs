//! Layouts that update each unit as soon as its gradient is reduced.

use crate::common::{DEFAULT, Layout, NamedOptimizer, OPTIONS, STEPS, batches, executor_with_layout};
use trireme_model::ModelConfig;
use trireme_optim::OptimizerName;
use trireme_parallel::{Executor, ExecutorOptions, GradNorm, StepPlan};
use trireme_schedule::{StateClass, StateLayout, Tier};
use trireme_tensor::{BackendKind, Category, DetachedOptions, Precision};
use trireme_testkit::{run_ranks, small_models};

/// Losses, norms and weights as bits.
type Found = (Vec<u64>, Vec<u32>);

fn plan(step: u64, grad_norm: GradNorm) -> StepPlan {
    StepPlan { step, lr: 1e-2, grad_norm, has_loss: true }
}

fn steps(executor: &mut Executor, num_microbatches: usize, grad_norm: GradNorm) -> Vec<u64> {
    let mut found = Vec::new();
    for step in 1..=STEPS {
        let batches = batches(executor, num_microbatches, step);
        let outcome = executor.run(plan(step, grad_norm), &mut batches.into_iter()).unwrap();
        found.extend([outcome.loss.to_bits(), outcome.grad_norm.unwrap().to_bits()]);
    }
    found
}

fn weights(executor: &mut Executor) -> Vec<u32> {
    executor.check_replicas().unwrap();
    let weights = executor.gather_parameters().unwrap();
    let flat = |unit| weights.as_ref().map_or_else(Vec::new, |all| all.values(unit).unwrap());
    (0..executor.model().num_units()).flat_map(flat).map(f32::to_bits).collect()
}

/// Returns the results of rank 0, and its peak memory of gradients.
fn run(config: &ModelConfig, layout: &Layout<'_>, world_size: usize) -> (Found, u64) {
    let results = run_ranks(world_size, |group| {
        let mut executor = executor_with_layout(config, group, 1, 1, layout);
        let num_data = world_size / layout.tensor;
        let found = steps(&mut executor, num_data, GradNorm::Measure);
        let peak = executor.device().memory().usage(Category::Gradients).peak;
        ((found, weights(&mut executor)), peak as u64)
    });
    results.into_iter().next().expect("rank 0")
}

fn early(state: StateLayout) -> StateLayout {
    StateLayout { updates_early: true, ..state }
}

#[test]
fn early_updates_have_the_bits_of_updates_at_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let bf16 = ExecutorOptions { precision: Precision::Bf16, ..OPTIONS };
    let rounded = ExecutorOptions { reduce_dtype: Precision::Bf16, ..bf16 };
    let plain = Layout { folder: folder.path(), ..Layout::default() };
    let shards = StateLayout::zero(1);
    let optimizer = |name| -> NamedOptimizer { (name, DEFAULT) };
    let layouts = [
        (1, plain.clone()),
        (2, plain.clone()),
        (4, plain.clone()),
        (2, Layout { options: bf16, ..plain.clone() }),
        (2, Layout { options: rounded, ..plain.clone() }),
        (2, Layout { num_shards: 2, state: shards, ..plain.clone() }),
        (4, Layout { num_shards: 2, state: shards, options: rounded, ..plain.clone() }),
        (
            2,
            Layout {
                num_shards: 2,
                state: shards.with_tier(StateClass::Optimizer, Tier::Disk),
                ..plain.clone()
            },
        ),
        (2, Layout { tensor: 2, ..plain.clone() }),
        (2, Layout { backend: BackendKind::Detached(DetachedOptions::default()), ..plain.clone() }),
        (4, Layout { tensor: 2, num_shards: 2, state: shards, ..plain.clone() }),
        (2, Layout { optimizer: optimizer(OptimizerName::Lamb), ..plain.clone() }),
        (
            2,
            Layout {
                optimizer: optimizer(OptimizerName::Adafactor),
                num_shards: 2,
                state: shards,
                ..plain.clone()
            },
        ),
        (2, Layout { optimizer: optimizer(OptimizerName::Muon), ..plain.clone() }),
    ];
    for config in small_models() {
        let can_run = |layout: &Layout<'_>| config.num_heads.is_multiple_of(layout.tensor);
        for (world_size, layout) in layouts.iter().filter(|(_, layout)| can_run(layout)) {
            let (expected, _) = run(&config, layout, *world_size);
            let freed = Layout { state: early(layout.state), ..layout.clone() };
            let (found, _) = run(&config, &freed, *world_size);
            assert!(found == expected, "{}:{} on {world_size}", config.family.name(), freed.state);
        }
    }
}

#[test]
fn few_gradients_exist_at_the_same_time() {
    let config = ModelConfig { num_layers: 12, ..small_models()[0].clone() };
    let rounded = ExecutorOptions { reduce_dtype: Precision::Bf16, precision: Precision::Bf16, ..OPTIONS };
    let shards = StateLayout::zero(1);
    for (world_size, num_shards, state, options) in [
        (1, 1, StateLayout::UNSHARDED, OPTIONS),
        (2, 1, StateLayout::UNSHARDED, rounded),
        (2, 2, shards, OPTIONS),
        (4, 2, shards, rounded),
    ] {
        let layout = |state| Layout { options, num_shards, state, ..Layout::default() };
        let (_, all) = run(&config, &layout(state), world_size);
        let (_, few) = run(&config, &layout(early(state)), world_size);
        assert!(few < all / 2, "{few} of {all} bytes on {world_size}, {num_shards} shards");
    }
}

#[test]
fn a_step_clips_by_the_norm_of_the_previous_step() {
    let config = &small_models()[0];
    let layout = Layout {
        optimizer: (OptimizerName::Sgd, DEFAULT),
        state: early(StateLayout::UNSHARDED),
        ..Layout::default()
    };
    let run = |grad_norm, norms: &[f64]| {
        let mut found = run_ranks(2, |group| {
            let mut executor = executor_with_layout(config, group, 1, 1, &layout);
            executor.restore_earlier_norms(norms);
            (steps(&mut executor, 2, grad_norm), executor.earlier_norms())
        });
        found.swap_remove(0)
    };
    let (unclipped, none) = run(GradNorm::Measure, &[]);
    assert!(none.is_empty());
    let norm = |found: &[u64], step: usize| f64::from_bits(found[2 * step + 1]);
    let (loose, norms) = run(GradNorm::Clip(1e9), &[]);
    assert!(loose == unclipped && norms == [norm(&loose, STEPS as usize - 1)]);
    let (clipped, _) = run(GradNorm::Clip(1e-3), &[]);
    // The first step has no norm to clip by, so the first two losses are the same.
    assert!(clipped[..4] == unclipped[..4] && clipped[4] != unclipped[4]);
    // A norm from an earlier run clips the first step.
    assert!(run(GradNorm::Clip(1e-3), &[1.0]).0[2] != unclipped[2]);
}

#[test]
fn an_infinite_loss_is_found_after_the_updates() {
    let config = &small_models()[0];
    let layout = Layout { state: early(StateLayout::UNSHARDED), ..Layout::default() };
    let failures = run_ranks(1, |group| {
        let mut executor = executor_with_layout(config, group, 1, 1, &layout);
        let mut step = |step, lr| {
            let batches = batches(&executor, 1, step);
            let plan = StepPlan { lr, ..plan(step, GradNorm::Measure) };
            executor.run(plan, &mut batches.into_iter())
        };
        step(1, 1e30).unwrap();
        step(2, 1.0).map(drop)
    });
    let failure = failures[0].as_ref().unwrap_err();
    assert!(failure.to_string().contains("resume from the last checkpoint"), "{failure}");
}
