//! Loss scaling does not change bits if nothing overflows. If one rank overflows, all ranks skip the step.

use crate::common::{OPTIONS, SHAPE, batches, change_shard, dynamic, executor, parameter_bits, train};
use trireme_comm::Group;
use trireme_model::{Batch, HostBatch, ModelConfig, set_window, token_specs};
use trireme_optim::LossScaling;
use trireme_parallel::{Executor, ExecutorOptions, GradNorm, NonFinite, Skipped, StepOutcome, StepPlan};
use trireme_tensor::Precision;
use trireme_testkit::{run_ranks, small_models};

const GRAD_NORMS: [GradNorm; 3] = [GradNorm::Off, GradNorm::Measure, GradNorm::Clip(0.5)];

/// A token that is removed from random batches, so that a test can give it to a single rank.
const RARE: u32 = 60;

/// The Llama model, whose embedding and output layer are not tied, so a row of the embedding is used only where its token is read.
fn untied() -> ModelConfig {
    small_models()[1].clone()
}

/// Sets the embedding of the rare token to NaN, so that reading the token makes all activations NaN.
fn poison(executor: &mut Executor) {
    let width = executor.model().table().parameters()[0].shape.cols();
    let row = RARE as usize * width..(RARE as usize + 1) * width;
    change_shard(executor, 0, |values| values[row].fill(f32::NAN));
}

/// Returns a batch without the rare token.
fn common_batch(executor: &Executor, step: u64) -> Batch {
    let mut batch = batches(executor, executor.group().world_size(), step).remove(0);
    for tokens in batch.values_mut() {
        let ids = executor.device().read::<u32>(tokens.view()).unwrap();
        let common: Vec<u32> = ids.into_iter().map(|token| token % RARE).collect();
        executor.device().upload(&common, tokens.view_mut());
    }
    batch
}

/// Returns a batch whose inputs and targets are all the same token.
fn uniform_batch(executor: &Executor, token: u32) -> Batch {
    let mut batch = HostBatch::new(&token_specs(SHAPE.0, SHAPE.1));
    (0..SHAPE.0).for_each(|row| set_window(&mut batch, row, &[token; SHAPE.1 + 1]));
    batch.upload(executor.device()).unwrap()
}

fn step(executor: &mut Executor, step: u64, grad_norm: GradNorm, batch: Batch) -> StepOutcome {
    let plan = StepPlan { step, lr: 1e-2, grad_norm, has_loss: true };
    executor.run(plan, &mut std::iter::once(batch)).unwrap()
}

/// Returns the bits of parameters and optimizer state.
fn all_bits(executor: &Executor) -> Vec<u32> {
    let mut bits = parameter_bits(executor);
    for unit in 0..executor.model().num_units() {
        for state in executor.optimizer().states(unit) {
            bits.extend(
                state.values(executor.optimizer_device()).unwrap().iter().map(|value| value.to_bits()),
            );
        }
    }
    bits
}

#[test]
fn a_scale_changes_no_bits() {
    for config in small_models() {
        let run = |loss_scaling| {
            let options = ExecutorOptions { loss_scaling, ..OPTIONS };
            run_ranks(2, |group| train(executor(&config, group, 1, 2, options), 4)).remove(0)
        };
        let unscaled = run(LossScaling::Off);
        for scaling in [LossScaling::Static(1 << 10), LossScaling::DYNAMIC, dynamic(1 << 24)] {
            assert!(run(scaling) == unscaled, "{scaling:?}");
        }
    }
}

/// Runs a step on four ranks. If one of them gets the batch that `other` returns, every rank must skip the step for `cause`. If none does,
/// no rank may skip it.
fn check_skipped(
    options: ExecutorOptions,
    grad_norm: GradNorm,
    other: impl Fn(&Executor) -> Batch + Sync,
    cause: NonFinite,
) {
    let LossScaling::Dynamic { initial, .. } = options.loss_scaling else { panic!("a dynamic scale") };
    for odd in [None, Some(0), Some(2)] {
        let ranks = run_ranks(4, |group: Group| {
            let rank = group.rank().0;
            let mut executor = executor(&untied(), group, 1, 1, options);
            poison(&mut executor);
            let before = all_bits(&executor);
            let batch = if odd == Some(rank) { other(&executor) } else { common_batch(&executor, 1) };
            let outcome = step(&mut executor, 1, grad_norm, batch);
            assert_eq!(
                outcome.skipped,
                odd.map(|_| Skipped::Overflow(cause)),
                "{options:?}, {grad_norm:?}, {odd:?}"
            );
            assert_eq!(outcome.loss_scale, initial);
            let (scaler, after) = (executor.loss_scaler(), all_bits(&executor));
            let expected = if odd.is_some() { (initial / 2, 1) } else { (initial, 0) };
            assert_eq!((scaler.scale(), scaler.skipped_steps()), expected);
            assert_eq!(before == after, odd.is_some(), "a skipped step changes nothing, another does");
            let loss_and_norm = (outcome.loss.to_bits(), outcome.grad_norm.map(f64::is_finite));
            (after, loss_and_norm)
        });
        assert!(ranks.iter().all(|rank| *rank == ranks[0]), "ranks agree");
    }
}

#[test]
fn a_loss_that_overflows_on_one_rank_is_skipped_by_all() {
    for precision in [Precision::F32, Precision::F16] {
        for (reduce_dtype, grad_norm) in
            [Precision::F32, Precision::Bf16, Precision::F16].into_iter().zip(GRAD_NORMS)
        {
            let options = ExecutorOptions { precision, reduce_dtype, loss_scaling: dynamic(256), ..OPTIONS };
            check_skipped(options, grad_norm, |executor| uniform_batch(executor, RARE), NonFinite::Loss);
        }
    }
}

#[test]
fn gradients_that_overflow_on_one_rank_are_skipped_by_all() {
    // All targets are the same token, so the gradient of its row of the output layer is about 1. Scaled, that exceeds f16; the gradients of
    // random targets do not.
    let options = ExecutorOptions { reduce_dtype: Precision::F16, loss_scaling: dynamic(1 << 16), ..OPTIONS };
    for grad_norm in GRAD_NORMS {
        check_skipped(options, grad_norm, |executor| uniform_batch(executor, 7), NonFinite::GradNorm);
    }
}

#[test]
fn updates_count_and_skipped_steps_do_not() {
    let options = ExecutorOptions { loss_scaling: dynamic(256), ..OPTIONS };
    let run = |num_skipped: u64| {
        run_ranks(2, |group| {
            let mut executor = executor(&untied(), group, 1, 1, options);
            poison(&mut executor);
            for number in 1..=num_skipped {
                let bad = uniform_batch(&executor, RARE);
                assert!(step(&mut executor, number, GradNorm::Measure, bad).skipped.is_some());
            }
            for number in 1..=2 {
                let batch = common_batch(&executor, number);
                let outcome = step(&mut executor, num_skipped + number, GradNorm::Measure, batch);
                assert_eq!(outcome.skipped, None);
            }
            all_bits(&executor)
        })
    };
    assert!(run(3) == run(0), "the bias corrections are those of the second update");
}

#[test]
fn a_step_without_loss_is_no_update_and_leaves_the_scale() {
    for loss_scaling in [LossScaling::Off, dynamic(256)] {
        let run = |num_skipped: u64| {
            run_ranks(2, |group| {
                let mut executor =
                    executor(&untied(), group, 1, 1, ExecutorOptions { loss_scaling, ..OPTIONS });
                let scale = executor.loss_scaler().scale();
                let before = all_bits(&executor);
                for step in 1..=num_skipped {
                    let plan = StepPlan { step, lr: 1e-2, grad_norm: GradNorm::Measure, has_loss: false };
                    let batch = common_batch(&executor, step);
                    let outcome = executor.run(plan, &mut std::iter::once(batch)).unwrap();
                    assert_eq!((outcome.skipped, outcome.grad_norm), (Some(Skipped::NoLoss), None));
                    assert!(outcome.loss.is_nan());
                }
                assert!(all_bits(&executor) == before);
                assert_eq!(
                    (executor.loss_scaler().scale(), executor.loss_scaler().skipped_steps()),
                    (scale, num_skipped)
                );
                for number in 1..=2 {
                    let batch = common_batch(&executor, number);
                    step(&mut executor, num_skipped + number, GradNorm::Measure, batch);
                }
                all_bits(&executor)
            })
        };
        assert!(run(3) == run(0), "the bias corrections are those of the second update");
    }
}

#[test]
fn the_scale_grows_with_good_steps() {
    run_ranks(2, |group| {
        let loss_scaling = LossScaling::Dynamic { initial: 8, growth_interval: 2 };
        let mut executor = executor(&untied(), group, 1, 1, ExecutorOptions { loss_scaling, ..OPTIONS });
        let scales = [1, 2, 3, 4, 5].map(|number| {
            let batch = common_batch(&executor, number);
            step(&mut executor, number, GradNorm::Off, batch).loss_scale
        });
        assert_eq!(scales, [8, 8, 16, 16, 32]);
    });
}

#[test]
fn a_scale_that_cannot_fall_ends_in_an_error_on_all_ranks() {
    for (loss_scaling, num_skipped, scale) in [(dynamic(4), 2, 1), (LossScaling::Static(1024), 0, 1024)] {
        run_ranks(2, |group| {
            let rank = group.rank().0;
            let options = ExecutorOptions { precision: Precision::F16, loss_scaling, ..OPTIONS };
            let mut executor = executor(&untied(), group, 1, 1, options);
            poison(&mut executor);
            let before = all_bits(&executor);
            let batch = |executor: &Executor| {
                if rank == 1 { uniform_batch(executor, RARE) } else { common_batch(executor, 1) }
            };
            for number in 1..=num_skipped {
                let batch = batch(&executor);
                step(&mut executor, number, GradNorm::Measure, batch);
            }
            let plan =
                StepPlan { step: num_skipped + 1, lr: 1e-2, grad_norm: GradNorm::Measure, has_loss: true };
            let batch = batch(&executor);
            let error = executor.run(plan, &mut std::iter::once(batch)).unwrap_err().to_string();
            let expected = format!(
                "step {}: the loss is NaN in f16; the loss scale of {scale} cannot decrease further, after {num_skipped} skipped steps",
                num_skipped + 1
            );
            assert!(error.starts_with(&expected), "{error}");
            assert!(all_bits(&executor) == before, "parameters stay");
        });
    }
}
