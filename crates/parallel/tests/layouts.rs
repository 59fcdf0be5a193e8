//! One rank and one thread are the oracle: every other layout gives the same bits.

use trireme_comm::Group;
use trireme_model::{Model, ModelConfig};
use trireme_optim::{AdamWSettings, Optimizer, OptimizerKind};
use trireme_parallel::{Determinism, Executor, ExecutorOptions, GradNorm, StepPlan};
use trireme_schedule::single;
use trireme_tensor::{Device, DeviceOptions, Precision};
use trireme_testkit::{random_batch, run_ranks, small_models};

const SHAPE: (usize, usize) = (2, 17);
const STEPS: u64 = 3;

fn executor(
    config: &ModelConfig,
    group: Group,
    num_threads: usize,
    accumulation: usize,
    determinism: Determinism,
) -> Executor {
    let device = Device::cpu(DeviceOptions { num_threads }).unwrap();
    let model = Model::new(config.clone(), &device).unwrap();
    let parameters = model.initial_parameters(&device, 1).unwrap();
    let kind = OptimizerKind::AdamW(AdamWSettings { beta1: 0.9, beta2: 0.95, epsilon: 1e-8 });
    let optimizer = Optimizer::new(kind, 0.1, false, model.table(), &device).unwrap();
    let program = single::program(model.num_units(), accumulation);
    let options = ExecutorOptions {
        precision: Precision::F32,
        determinism,
        local_batch_size: SHAPE.0,
        seq_len: SHAPE.1,
    };
    Executor::new(model, parameters, optimizer, group.into(), &device, program, options).unwrap()
}

/// Losses, norms and all parameters as bits after a few steps over the same global batches.
fn train(mut executor: Executor, num_microbatches: usize) -> (Vec<[u64; 2]>, Vec<u32>) {
    let per_rank = num_microbatches / executor.group().world_size();
    let first = executor.group().rank().0 * per_rank;
    let vocab_size = executor.model().config().vocab_size;
    let mut found = Vec::new();
    for step in 1..=STEPS {
        let device = executor.device().clone();
        let batches: Vec<_> = (first..first + per_rank)
            .map(|index| random_batch(&device, SHAPE, vocab_size, step, index))
            .collect();
        let plan = StepPlan { step, lr: 1e-2, grad_norm: GradNorm::Clip(0.5) };
        let outcome = executor.run(plan, &mut batches.into_iter()).unwrap();
        found.push([outcome.loss.to_bits(), outcome.grad_norm.unwrap().to_bits()]);
    }
    executor.check_replicas().unwrap();
    let flat = |unit| executor.parameters().flat(unit).f32s().to_vec();
    let parameters = (0..executor.model().num_units()).flat_map(flat).map(f32::to_bits).collect();
    (found, parameters)
}

#[test]
fn any_number_of_workers_and_threads_gives_the_same_bits() {
    for config in small_models() {
        for num_microbatches in [4, 8] {
            let run = |world_size: usize, num_threads: usize| {
                let mut results = run_ranks(world_size, |group| {
                    let accumulation = num_microbatches / world_size;
                    let executor = executor(&config, group, num_threads, accumulation, Determinism::Layout);
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
                    "{world_size} workers, {num_threads} threads"
                );
            }
        }
    }
}

#[test]
fn summing_in_place_differs_in_the_last_bits_only() {
    let config = &small_models()[0];
    let run =
        |determinism| run_ranks(2, |group| train(executor(config, group, 1, 4, determinism), 8)).remove(0);
    let (tree, in_place) = (run(Determinism::Layout), run(Determinism::Run));
    assert_eq!(run(Determinism::Run), in_place, "the same layout gives the same bits");
    assert_ne!(tree, in_place);
    for (a, b) in tree.0.iter().zip(&in_place.0) {
        let (a, b) = (f64::from_bits(a[0]), f64::from_bits(b[0]));
        assert!((a - b).abs() < 1e-4, "{a} {b}");
    }
}

#[test]
fn an_odd_number_of_ranks_is_exact_from_run_to_run() {
    let config = &small_models()[1];
    let run = || run_ranks(3, |group| train(executor(config, group, 1, 1, Determinism::Layout), 3)).remove(0);
    assert_eq!(run(), run());
}

#[test]
fn replicas_that_differ_are_named() {
    let config = &small_models()[0];
    let errors = run_ranks(3, |group| {
        let rank = group.rank().0;
        let mut executor = executor(config, group, 1, 1, Determinism::Layout);
        if rank == 2 {
            executor.state_mut().0.flat_mut(1).f32s()[5] += 1e-3;
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
        let mut executor = executor(config, group, 1, 1, Determinism::Layout);
        if rank == 1 {
            executor.state_mut().0.flat_mut(1).f32s()[0] = f32::NAN;
        }
        let before = executor.parameters().flat(2).f32s().to_vec();
        let batch = random_batch(&executor.device().clone(), SHAPE, config.vocab_size, 1, rank);
        let plan = StepPlan { step: 7, lr: 1e-2, grad_norm: GradNorm::Off };
        let error = executor.run(plan, &mut vec![batch].into_iter()).unwrap_err().to_string();
        assert!(error.contains("step 7: the loss is NaN"), "{error}");
        assert_eq!(executor.parameters().flat(2).f32s(), before, "parameters stay");
    });
}
