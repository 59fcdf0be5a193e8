//! Training in emulated fp8: the same bits with every layout, and nearly the same losses as in bf16.

use crate::common::{OPTIONS, batches, executor, parameter_bits, train};
use trireme_parallel::{Executor, ExecutorOptions, GradNorm, StepPlan};
use trireme_tensor::{Fp8Formats, Fp8Recipe, Precision};
use trireme_testkit::{run_ranks, small_models};

const BF16: ExecutorOptions = ExecutorOptions { precision: Precision::Bf16, ..OPTIONS };

fn fp8(formats: Fp8Formats, amax_history_len: usize) -> ExecutorOptions {
    ExecutorOptions { fp8: Some(Fp8Recipe { formats, amax_history_len, margin: 0 }), ..BF16 }
}

/// Returns the amax history of every layer, as bits.
fn history(executor: &Executor) -> Vec<u32> {
    let state = executor.fp8_state().unwrap();
    (0..state.layers().len()).flat_map(|layer| state.history(layer).0.to_vec()).map(f32::to_bits).collect()
}

#[test]
fn any_layout_gives_the_same_bits() {
    for (formats, num_microbatches) in [(Fp8Formats::Hybrid, 4), (Fp8Formats::E4m3, 8)] {
        for config in small_models() {
            let run = |options, world_size: usize, num_threads: usize| {
                let mut results = run_ranks(world_size, |group| {
                    let accumulation = num_microbatches / world_size;
                    train(executor(&config, group, num_threads, accumulation, options), num_microbatches)
                });
                let first = results.remove(0);
                assert!(results.iter().all(|result| *result == first), "ranks agree");
                first
            };
            let options = fp8(formats, 2);
            let oracle = run(options, 1, 1);
            assert!(run(BF16, 1, 1) != oracle, "factors are rounded");
            for (world_size, num_threads) in [(1, 3), (2, 1), (2, 2), (4, 1), (4, 3)] {
                assert!(
                    run(options, world_size, num_threads) == oracle,
                    "{world_size} x {num_threads}, {formats}"
                );
            }
        }
    }
}

/// Trains on the same batch in every step. If it `validates`, evaluates a batch every second step.
fn losses(executor: &mut Executor, num_steps: u64, validates: bool) -> Vec<f64> {
    let step = |step| {
        let plan = StepPlan { step, lr: 3e-3, grad_norm: GradNorm::Measure, has_loss: true };
        let batches = batches(executor, executor.group().world_size(), 1);
        let loss = executor.run(plan, &mut batches.into_iter()).unwrap().loss;
        if validates && step % 2 == 0 {
            let batch = crate::common::batches(executor, executor.group().world_size(), step).remove(0);
            executor.evaluate(Some(batch)).unwrap();
        }
        loss
    };
    (1..=num_steps).map(step).collect()
}

#[test]
fn the_loss_falls_as_it_does_in_bf16() {
    for config in small_models() {
        let run = |options| {
            run_ranks(1, |group| losses(&mut executor(&config, group, 1, 1, options), 40, false)).remove(0)
        };
        let bf16 = run(BF16);
        for formats in [Fp8Formats::Hybrid, Fp8Formats::E4m3] {
            let found = run(fp8(formats, 16));
            assert!((found[0] / bf16[0] - 1.0).abs() < 0.01, "{} {}", found[0], bf16[0]);
            assert!(found[39] < 0.5 * found[0], "{formats}: from {} to {}", found[0], found[39]);
            assert!((found[39] - bf16[39]).abs() < 0.05 * bf16[0], "{formats}: {} {}", found[39], bf16[39]);
        }
    }
}

#[test]
fn validation_changes_no_scale() {
    let config = &small_models()[1];
    let run = |validates| {
        run_ranks(2, |group| {
            let mut executor = executor(config, group, 1, 1, fp8(Fp8Formats::Hybrid, 4));
            (losses(&mut executor, 6, validates), history(&executor), parameter_bits(&executor))
        })
    };
    let found = run(true);
    assert!(found[0].1.iter().all(|&amax| amax > 0), "every factor of every step was seen");
    assert!(found[0] == found[1], "ranks agree");
    assert!(found == run(false));
}
