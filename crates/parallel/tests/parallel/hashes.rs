//! Hashes of gradients and parameters are the same with any layout, and identify the tensor that differs.

use crate::common::{
    ASYNCHRONOUS_STEPS, Layout, OPTIONS, Pipeline, batches, change_shard, dynamic, executor_with_layout,
};
use std::sync::Arc;
use trireme_model::ModelConfig;
use trireme_parallel::{Executor, ExecutorOptions, GradNorm, StepHashes, StepPlan};
use trireme_schedule::pipeline::ScheduleKind;
use trireme_schedule::{Portion, StateClass, StateLayout, Tier};
use trireme_tensor::{BackendKind, DetachedOptions, Precision};
use trireme_testkit::{run_ranks, small_models};

const MICROBATCHES: usize = 4;

fn plan(step: u64) -> StepPlan {
    StepPlan { step, lr: 1e-2, grad_norm: GradNorm::Clip(0.5), has_loss: true }
}

/// The hashes of the initial parameters, and the hashes of steps 2 and 4.
type Found = (Vec<u64>, Vec<StepHashes>);

fn train(executor: &mut Executor) -> Found {
    executor.record_hashes(2);
    let initial = executor.hash_parameters().unwrap();
    let mut found = Vec::new();
    for step in 1..=4 {
        let batches = batches(executor, MICROBATCHES, step);
        executor.run(plan(step), &mut batches.into_iter()).unwrap();
        found.extend(executor.take_hashes().unwrap());
    }
    assert_eq!(executor.hash_parameters().unwrap(), found[1].parameters, "of the state after the last step");
    (initial, found)
}

fn run(config: &ModelConfig, layout: &Layout<'_>, num_ranks: usize) -> Found {
    let pipeline_degree = layout.pipeline.map_or(1, |pipeline| pipeline.num_ranks);
    let accumulation = MICROBATCHES * pipeline_degree * layout.tensor / num_ranks;
    let found = run_ranks(num_ranks, |group| {
        train(&mut executor_with_layout(config, group, 1, accumulation, layout))
    });
    assert!(found.iter().all(|of_rank| *of_rank == found[0]), "ranks agree");
    found.into_iter().next().unwrap()
}

fn experts() -> ModelConfig {
    ModelConfig::from_json(
        r#"{"model_type": "mixtral", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 20,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
            "max_position_embeddings": 32, "num_local_experts": 4}"#,
    )
    .unwrap()
}

#[test]
fn hashes_do_not_depend_on_the_layout() {
    let bf16 = ExecutorOptions { precision: Precision::Bf16, ..OPTIONS };
    let folder = tempfile::tempdir().unwrap();
    let only_gradients = {
        let mut state = StateLayout::UNSHARDED;
        state.gradients.portion = Portion::Shard;
        state
    };
    let with_tier = |class, tier| StateLayout::zero(3).with_tier(class, tier);
    for options in [OPTIONS, bf16] {
        let plain = Layout { options, folder: folder.path(), ..Layout::default() };
        let pipeline = |num_ranks| Layout {
            pipeline: Some(Pipeline { kind: ScheduleKind::OneFOneB, num_ranks, stages_per_rank: 1 }),
            ..plain.clone()
        };
        let sharded = |state, num_shards| Layout { state, num_shards, ..plain.clone() };
        let mut layouts = vec![
            (2, plain.clone()),
            (2, pipeline(2)),
            (4, pipeline(2)),
            (2, sharded(only_gradients, 2)),
            (4, sharded(StateLayout::zero(1), 2)),
            (4, sharded(StateLayout::zero(3), 4)),
            (2, sharded(with_tier(StateClass::Gradients, Tier::Host), 2)),
            (2, sharded(with_tier(StateClass::Optimizer, Tier::Disk), 2)),
        ];
        let detached = BackendKind::Detached(DetachedOptions { seed: 3, ignored_wait: None });
        layouts.push((2, Layout { backend: detached, ..plain.clone() }));
        for config in small_models() {
            let oracle = run(&config, &plain, 1);
            assert_eq!(oracle.1.iter().map(|hashes| hashes.step).collect::<Vec<_>>(), [2, 4]);
            assert_ne!(oracle.0, oracle.1[0].parameters, "steps change parameters");
            for (num_ranks, layout) in &layouts {
                let found = run(&config, layout, *num_ranks);
                assert!(found == oracle, "{} on {num_ranks} ranks, {}", config.family.name(), layout.state);
            }
        }
        let config = experts();
        let oracle = run(&config, &plain, 1);
        for (num_ranks, num_shards, degree, stage) in [(4, 1, 2, 0), (4, 4, 4, 3), (4, 2, 2, 3), (4, 2, 4, 1)]
        {
            let layout = Layout { experts: degree, ..sharded(StateLayout::zero(stage), num_shards) };
            let found = run(&config, &layout, num_ranks);
            assert!(found == oracle, "{degree} ranks with different experts, ZeRO-{stage}");
        }
    }
}

#[test]
fn parts_of_the_tensor_axis_have_the_hash_of_the_whole() {
    // With four ranks, two share a key and value head. The vocabulary is not divisible by the number of ranks.
    let config = ModelConfig::from_json(
        r#"{"model_type": "llama", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
            "max_position_embeddings": 32}"#,
    )
    .unwrap();
    let oracle = run(&config, &Layout::default(), 1);
    let sharded = Layout { state: StateLayout::zero(3), num_shards: 2, ..Layout::default() };
    for (num_ranks, layout) in [(2, Layout::default()), (4, Layout::default()), (4, sharded)] {
        let tensor = num_ranks / layout.num_shards;
        let (initial, steps) = run(&config, &Layout { tensor, ..layout }, num_ranks);
        assert_eq!(initial, oracle.0, "{tensor} ranks cut the same initial values");
        assert_ne!(steps, oracle.1, "sums over parts of layers are rounded otherwise");
    }
}

#[test]
fn a_changed_element_changes_the_hash_of_its_tensor_alone() {
    let config = &small_models()[0];
    let layout = Layout { state: StateLayout::zero(3), num_shards: 2, ..Layout::default() };
    let changed = run_ranks(2, |group| {
        let is_last = group.rank().0 == 1;
        let mut executor = executor_with_layout(config, group, 1, 2, &layout);
        let before = executor.hash_parameters().unwrap();
        if is_last {
            change_shard(&mut executor, 1, |values| {
                let last = values.last_mut().unwrap();
                *last = f32::from_bits(last.to_bits() ^ 1);
            });
        }
        let after = executor.hash_parameters().unwrap();
        let table = Arc::clone(executor.model().table());
        let names = table.parameters().iter().zip(before.iter().zip(&after));
        let differing = names.filter(|(_, (before, after))| before != after);
        let last = &table.parameters()[table.units()[1].parameters.end - 1];
        (differing.map(|(info, _)| info.name.clone()).collect::<Vec<_>>(), last.name.clone())
    });
    for (differing, last) in changed {
        assert_eq!(differing, [last]);
    }
}

#[test]
fn skipped_steps_have_no_hashes_and_steps_of_one_program_have_their_own() {
    // The scale is far too high for f16.
    let options = ExecutorOptions { precision: Precision::F16, loss_scaling: dynamic(1 << 24), ..OPTIONS };
    let config = &small_models()[0];
    let layout = Layout { options, ..Layout::default() };
    run_ranks(1, |group| {
        let mut executor = executor_with_layout(config, group, 1, MICROBATCHES, &layout);
        executor.record_hashes(1);
        let batches = batches(&executor, MICROBATCHES, 1);
        let outcome = executor.run(plan(1), &mut batches.into_iter()).unwrap();
        assert!(outcome.skipped.is_some());
        assert_eq!(executor.take_hashes().unwrap(), []);
    });
    // Without tied weights, because their copies could have different versions.
    let config = &experts();
    let pipeline = Pipeline { kind: ScheduleKind::PipeDream, num_ranks: 2, stages_per_rank: 1 };
    let layout = Layout { pipeline: Some(pipeline), ..Layout::default() };
    run_ranks(2, |group| {
        let mut executor = executor_with_layout(config, group, 1, MICROBATCHES, &layout);
        executor.record_hashes(2);
        let batches = batches(&executor, MICROBATCHES * ASYNCHRONOUS_STEPS, 1);
        let plans: Vec<StepPlan> = (1..=ASYNCHRONOUS_STEPS as u64).map(plan).collect();
        executor.run_steps(&plans, &mut batches.into_iter(), &mut Vec::new()).unwrap();
        let found = executor.take_hashes().unwrap();
        assert_eq!(found.iter().map(|hashes| hashes.step).collect::<Vec<_>>(), [2, 4, 6]);
        assert_eq!(found[2].parameters, executor.hash_parameters().unwrap());
        assert_ne!(found[0].parameters, found[1].parameters);
        assert!(found.iter().all(|hashes| !hashes.gradients.contains(&0)));
    });
}
