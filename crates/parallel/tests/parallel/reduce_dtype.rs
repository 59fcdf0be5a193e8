//! Gradients that are summed over ranks in 16 bits: half the bytes, and nearly the same values.

use crate::common::{OPTIONS, batches, executor, train};
use trireme_parallel::{ExecutorOptions, GradNorm, StepPlan};
use trireme_tensor::{Category, Precision};
use trireme_testkit::{run_ranks, small_models};

/// The relative rounding error of each dtype: half a unit in the last place.
const ROUNDING_ERRORS: [(Precision, f64); 2] =
    [(Precision::Bf16, 1.0 / 256.0), (Precision::F16, 1.0 / 2048.0)];

fn options(reduce_dtype: Precision) -> ExecutorOptions {
    ExecutorOptions { reduce_dtype, ..OPTIONS }
}

#[test]
fn gradients_differ_by_their_rounding() {
    for config in small_models() {
        let run = |world_size: usize, reduce_dtype| {
            let ranks = run_ranks(world_size, |group| {
                train(executor(&config, group, 1, 4 / world_size, options(reduce_dtype)), 4)
            });
            assert!(ranks.iter().all(|rank| *rank == ranks[0]), "ranks agree");
            ranks.into_iter().next().unwrap()
        };
        let exact = run(1, Precision::F32);
        for (reduce_dtype, rounding) in ROUNDING_ERRORS {
            assert!(run(1, reduce_dtype) == exact, "nothing is sent, so nothing is rounded");
            for world_size in [2, 4] {
                let found = run(world_size, reduce_dtype);
                assert!(found == run(world_size, reduce_dtype), "the same bits from run to run");
                let norms = [&found, &exact].map(|(steps, _)| f64::from_bits(steps[0][1]));
                assert_ne!(norms[0], norms[1], "gradients are rounded");
                let difference = (norms[0] / norms[1] - 1.0).abs();
                assert!(difference < rounding, "{reduce_dtype}, {world_size} workers: {difference}");
            }
        }
    }
}

#[test]
fn sixteen_bits_halve_the_bytes_of_messages_and_of_gradients() {
    let config = &small_models()[0];
    let run = |reduce_dtype| {
        run_ranks(2, |group| {
            let alone = ExecutorOptions { fusion_bytes: 0, ..options(reduce_dtype) };
            let mut executor = executor(config, group, 1, 1, alone);
            let batches = batches(&executor, 2, 1);
            let plan = StepPlan { step: 1, lr: 1e-2, grad_norm: GradNorm::Off, has_loss: true };
            executor.run(plan, &mut batches.into_iter()).unwrap();
            let memory = executor.device().memory().usage(Category::Gradients).current;
            let num_elements = executor.model().table().num_elements();
            (executor.group().statistics().payload_bytes, memory, num_elements)
        })
        .remove(0)
    };
    let (bytes, memory, num_elements) = run(Precision::F32);
    assert_eq!(memory, 4 * num_elements, "gradients are reduced where they lie");
    for (reduce_dtype, _) in ROUNDING_ERRORS {
        let (half_bytes, memory, _) = run(reduce_dtype);
        assert_eq!(memory, 2 * num_elements);
        // The loss, and the requests of the rank.
        let other_bytes = 16;
        assert_eq!(2 * (half_bytes - other_bytes), bytes - other_bytes, "{reduce_dtype}");
    }
}
