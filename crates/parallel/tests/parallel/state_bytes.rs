//! The memory and traffic of ranks agree with the formulas of the ZeRO paper.

use crate::common::{Layout, OPTIONS, batches, executor_with_layout};
use trireme_model::ModelConfig;
use trireme_parallel::{Executor, ExecutorOptions, GradNorm, StepPlan, ValidationBatches};
use trireme_schedule::{ClassLayout, Portion, StateClass, StateLayout, Tier};
use trireme_tensor::{Category, Precision};
use trireme_testkit::run_ranks;

/// A model so large that padding is negligible.
fn config() -> ModelConfig {
    let text = r#"{"model_type": "gpt2", "vocab_size": 700, "n_positions": 64, "n_embd": 128, "n_layer": 2, "n_head": 4}"#;
    ModelConfig::from_json(text).unwrap()
}

/// Returns the bytes of parameters, gradients and optimizer state that a rank holds after a step, per parameter.
fn state_bytes(
    options: ExecutorOptions,
    state: StateLayout,
    world_size: usize,
    num_shards: usize,
) -> [f64; 3] {
    let ranks = run_ranks(world_size, |group| {
        let mut executor = executor_with_layout(
            &config(),
            group,
            1,
            1,
            &Layout { options, num_shards, state, ..Layout::default() },
        );
        let batches = batches(&executor, world_size, 1);
        let plan = StepPlan { step: 1, lr: 1e-2, grad_norm: GradNorm::Clip(1.0), has_loss: true };
        executor.run(plan, &mut batches.into_iter()).unwrap();
        let num_elements = executor.model().table().num_elements() as f64;
        [Category::Parameters, Category::Gradients, Category::Optimizer]
            .map(|category| executor.device().memory().usage(category).current as f64 / num_elements)
    });
    ranks.into_iter().reduce(|a, b| std::array::from_fn(|index| a[index].max(b[index]))).unwrap()
}

#[test]
fn states_take_the_bytes_of_the_paper() {
    // Bytes per element of parameters, gradients and optimizer state. In 16 bits, master weights count as optimizer state.
    let f32 = (OPTIONS, [4.0, 4.0, 8.0]);
    let bf16 = Precision::Bf16;
    let bf16 = (ExecutorOptions { precision: bf16, reduce_dtype: bf16, ..OPTIONS }, [2.0, 2.0, 12.0]);
    for (options, whole) in [f32, bf16] {
        for num_ranks in [1, 2, 4] {
            for zero_stage in 0..=3 {
                let num_shards = if zero_stage == 0 { 1 } else { num_ranks };
                let found = state_bytes(options, StateLayout::zero(zero_stage), num_ranks, num_shards);
                let share = |index: usize, stage: usize| {
                    if zero_stage >= stage { whole[index] / num_shards as f64 } else { whole[index] }
                };
                let formula = share(0, 3) + share(1, 2) + share(2, 1);
                let found_sum: f64 = found.iter().sum();
                // In 16 bits, the paper counts 16-bit parameters and f32 master weights. In two cases, only the f32 weights are stored: in
                // stage 3, which gathers parameters from them, and without sharding, where matrix products round them.
                let is_narrow = options.precision != Precision::F32 && num_ranks > 1;
                let not_stored = match zero_stage {
                    0 | 3 if is_narrow => share(0, 3),
                    _ => 0.0,
                };
                let least = formula - not_stored;
                assert!(
                    (0.95 * least..1.05 * formula).contains(&found_sum),
                    "stage {zero_stage} on {num_ranks}, {}: {found:?} are {found_sum}, the paper's {formula}",
                    options.precision
                );
            }
        }
    }
}

#[test]
fn stages_send_the_bytes_of_the_paper() {
    let sent = |state: StateLayout, num_ranks: usize| {
        let num_shards = if state.has_shards() { num_ranks } else { 1 };
        let options = ExecutorOptions { fusion_bytes: 0, ..OPTIONS };
        let ranks = run_ranks(num_ranks, |group| {
            let mut executor = executor_with_layout(
                &config(),
                group,
                1,
                1,
                &Layout { options, num_shards, state, ..Layout::default() },
            );
            let before = executor.ranks().payload_bytes();
            let batches = batches(&executor, num_ranks, 1);
            let plan = StepPlan { step: 1, lr: 1e-2, grad_norm: GradNorm::Clip(1.0), has_loss: true };
            executor.run(plan, &mut batches.into_iter()).unwrap();
            if !state.is_sharded(StateClass::Parameters) {
                // Waits for gathers that the end of the step has started.
                executor.evaluate(None).unwrap();
            }
            executor.group().barrier().wait().unwrap();
            (executor.ranks().payload_bytes() - before) as f64
        });
        ranks.into_iter().sum::<f64>()
    };
    for num_ranks in [2, 4] {
        let plain = sent(StateLayout::UNSHARDED, num_ranks);
        let [one, two, three] = [1, 2, 3].map(|stage| sent(StateLayout::zero(stage), num_ranks) / plain);
        let gradients = ClassLayout { portion: Portion::Shard, tier: Tier::Device };
        let gradients = sent(StateLayout { gradients, ..StateLayout::UNSHARDED }, num_ranks) / plain;
        assert!((0.99..1.01).contains(&gradients), "{gradients} on {num_ranks}");
        assert!((0.99..1.01).contains(&one) && (0.99..1.01).contains(&two), "{one} {two} on {num_ranks}");
        assert!((1.48..1.51).contains(&three), "{three} on {num_ranks}");
    }
}

#[test]
fn buffers_for_reports_of_losses_are_counted() {
    let bytes = |executor: &Executor| executor.device().memory().usage(Category::Communication).current;
    run_ranks(2, |group| {
        let mut executor = executor_with_layout(&config(), group, 1, 1, &Layout::default());
        let before = bytes(&executor);
        let reports = executor.allocate_validation_reports(&ValidationBatches::new(10, 4)).unwrap();
        assert_eq!(bytes(&executor) - before, size_of_val(&reports[..]));
    });
    // A loss for each microbatch of each rank.
    let [few, many] = [2, 5].map(|num_microbatches| {
        let of_rank =
            |group| bytes(&executor_with_layout(&config(), group, 1, num_microbatches, &Layout::default()));
        run_ranks(2, of_rank)[0]
    });
    assert_eq!(many - few, 2 * 3 * size_of::<f64>());
}
