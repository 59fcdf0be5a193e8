//! Every layout gives the same bits as one rank with one thread.

use crate::common::{OPTIONS, SHAPE, change_shard, dynamic, executor, shard_values, train};
use trireme_parallel::{Determinism, ExecutorOptions, GradNorm, StepPlan};
use trireme_tensor::Precision;
use trireme_testkit::{random_batch, run_ranks, small_models};

#[test]
fn any_number_of_workers_and_threads_gives_the_same_bits() {
    let f16 = ExecutorOptions { precision: Precision::F16, loss_scaling: dynamic(256), ..OPTIONS };
    let bf16 = ExecutorOptions { precision: Precision::Bf16, ..OPTIONS };
    for (options, num_microbatches) in [(OPTIONS, 4), (OPTIONS, 8), (bf16, 4), (f16, 8)] {
        for config in small_models() {
            let run = |world_size: usize, num_threads: usize| {
                let mut results = run_ranks(world_size, |group| {
                    let accumulation = num_microbatches / world_size;
                    let executor = executor(&config, group, num_threads, accumulation, options);
                    train(executor, num_microbatches)
                });
                let first = results.remove(0);
                assert!(results.iter().all(|result| *result == first), "ranks agree");
                first
            };
            let oracle = run(1, 1);
            assert!(oracle.0[0][0] != oracle.0[2][0], "training changes the loss");
            for (world_size, num_threads) in [(1, 2), (1, 3), (2, 1), (2, 2), (4, 1), (4, 3)] {
                assert!(
                    run(world_size, num_threads) == oracle,
                    "{world_size} workers, {num_threads} threads, {}",
                    options.precision
                );
            }
        }
    }
}

#[test]
fn summing_in_place_differs_in_the_last_bits_only() {
    let config = &small_models()[0];
    let run = |determinism| {
        let options = ExecutorOptions { determinism, ..OPTIONS };
        run_ranks(2, |group| train(executor(config, group, 1, 4, options), 8)).remove(0)
    };
    let (tree, in_place) = (run(Determinism::Layout), run(Determinism::Run));
    assert_eq!(run(Determinism::Run), in_place, "the same layout gives the same bits");
    assert_ne!(tree, in_place);
    for (a, b) in tree.0.iter().zip(&in_place.0) {
        let (a, b) = (f64::from_bits(a[0]), f64::from_bits(b[0]));
        assert!((a - b).abs() < 1e-4, "{a} {b}");
    }
}

#[test]
fn an_odd_number_of_ranks_is_reproducible() {
    let config = &small_models()[1];
    let run = || run_ranks(3, |group| train(executor(config, group, 1, 1, OPTIONS), 3)).remove(0);
    assert_eq!(run(), run());
}

#[test]
fn replicas_that_differ_are_named() {
    let config = &small_models()[0];
    let errors = run_ranks(3, |group| {
        let rank = group.rank().0;
        let mut executor = executor(config, group, 1, 1, OPTIONS);
        if rank == 2 {
            change_shard(&mut executor, 1, |values| values[5] += 1e-3);
        }
        executor.check_replicas().unwrap_err().to_string()
    });
    assert!(errors.iter().all(|error| error.contains("parameters of rank 2 differ")), "{errors:?}");
}

#[test]
fn a_loss_that_is_not_finite_stops_before_the_update() {
    let config = &small_models()[0];
    run_ranks(2, |group| {
        let rank = group.rank().0;
        let mut executor = executor(config, group, 1, 1, OPTIONS);
        if rank == 1 {
            change_shard(&mut executor, 1, |values| values[0] = f32::NAN);
        }
        let before = shard_values(&executor, 2);
        let batch = random_batch(&executor.device().clone(), SHAPE, config.vocab_size, 1, rank);
        let plan = StepPlan { step: 7, lr: 1e-2, grad_norm: GradNorm::Off, has_loss: true };
        let error = executor.run(plan, &mut vec![batch].into_iter()).unwrap_err().to_string();
        assert!(error.contains("step 7: the loss is NaN"), "{error}");
        assert_eq!(shard_values(&executor, 2), before, "parameters stay");
    });
}
