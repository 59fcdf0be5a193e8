//! Compressed momentum that is exchanged instead of gradients, by 1-bit Adam and 0/1 Adam.

use crate::common::{
    DEFAULT, Layout, NamedOptimizer, OPTIONS, batches, change_shard, dynamic, executor_with_layout,
    parameter_bits, shard_values,
};
use trireme_codec::{CodecName, Compression, CompressionOptions, Compressor, StateValues};
use trireme_comm::{Group, GroupOptions, inproc_world_with};
use trireme_model::{ModelConfig, TOKENS};
use trireme_optim::{LossScaling, OptimizerName, OptimizerSettings};
use trireme_parallel::{
    Determinism, Executor, ExecutorOptions, GradNorm, NonFinite, Skipped, StepOutcome, StepPlan,
};
use trireme_schedule::collective::FlatAlgorithm;
use trireme_tensor::Precision;
use trireme_testkit::{on_threads, run_ranks, small_models};

const BLOCK_LEN: usize = 128;
const ONE_BIT_ADAM: NamedOptimizer =
    (OptimizerName::OneBitAdam, OptimizerSettings { freeze_step: 3, ..DEFAULT });
/// Updates the variance in steps 1, 2, 3, 5, 7, 11, 15 and 23.
const ZERO_ONE_ADAM: NamedOptimizer =
    (OptimizerName::ZeroOneAdam, OptimizerSettings { var_update_scaler: 2, ..DEFAULT });

fn model() -> ModelConfig {
    small_models()[1].clone()
}

fn one_bit() -> Compression {
    let options = CompressionOptions {
        codec: CodecName::OneBit,
        block_len: Some(BLOCK_LEN),
        ..CompressionOptions::default()
    };
    Compression::new(&options).unwrap()
}

fn executor(
    group: Group,
    optimizer: NamedOptimizer,
    compression: Compression,
    loss_scaling: LossScaling,
) -> Executor {
    let options = ExecutorOptions { compression, loss_scaling, determinism: Determinism::Run, ..OPTIONS };
    executor_with_layout(&model(), group, 1, 2, &Layout { options, optimizer, ..Layout::default() })
}

fn step(executor: &mut Executor, number: u64) -> StepOutcome {
    let world_size = executor.group().world_size();
    let batches = batches(executor, 2 * world_size, number);
    let plan = StepPlan { step: number, lr: 3e-3, grad_norm: GradNorm::Measure, has_loss: true };
    executor.run(plan, &mut batches.into_iter()).unwrap()
}

/// Returns the state of all compressors, as bits.
fn compressor_bits(executor: &Executor) -> Vec<u64> {
    let bits = |compressor: &Compressor| -> Vec<u64> {
        let values = |values: StateValues<'_>| match values {
            StateValues::F32(values) => values.iter().map(|value| u64::from(value.to_bits())).collect(),
            StateValues::U64(values) => values.to_vec(),
        };
        compressor.state().flat_map(|(_, found)| -> Vec<u64> { values(found) }).collect()
    };
    executor.compressors().flat_map(|(_, compressor)| bits(compressor)).collect()
}

/// Returns both moments, as bits.
fn moments(executor: &Executor) -> Vec<u32> {
    let states = (0..executor.model().num_units()).flat_map(|unit| executor.optimizer().states(unit));
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<u32>>();
    states.flat_map(|state| bits(&state.values(executor.optimizer_device()).unwrap())).collect()
}

#[test]
fn a_precise_codec_matches_the_exchange_of_gradients() {
    let bf16 = CompressionOptions { codec: CodecName::Bf16, ..CompressionOptions::default() };
    for schedule in [ONE_BIT_ADAM, ZERO_ONE_ADAM] {
        let run = |compression: Compression| {
            run_ranks(2, |group| {
                let mut executor = executor(group, schedule, compression, LossScaling::Off);
                let norms: Vec<_> = (1..=8).map(|number| step(&mut executor, number).grad_norm).collect();
                executor.check_replicas().unwrap();
                let parameters: Vec<f32> =
                    parameter_bits(&executor).into_iter().map(f32::from_bits).collect();
                (norms.iter().map(Option::is_some).collect::<Vec<bool>>(), parameters)
            })
            .remove(0)
        };
        let (all, expected) = run(Compression::none());
        assert_eq!(all, [true; 8]);
        let gradient_steps = match schedule {
            ONE_BIT_ADAM => [true, true, true, false, false, false, false, false],
            _ => [true, true, true, false, true, false, true, false],
        };
        let (measured, found) = run(Compression::new(&bf16).unwrap());
        assert_eq!(measured, gradient_steps, "the norm is known where gradients are exchanged");
        let difference = found.iter().zip(&expected).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
        assert!(difference < 2e-3 && difference > 0.0, "{schedule:?}: {difference}");
    }
}

#[test]
fn replicas_stay_equal_and_the_loss_falls() {
    for schedule in [ONE_BIT_ADAM, ZERO_ONE_ADAM] {
        for world_size in [2, 4] {
            let losses = run_ranks(world_size, |group| {
                let mut executor = executor(group, schedule, one_bit(), LossScaling::Off);
                let run = |number| {
                    // Each rank has its own data, the same in every step.
                    let batches = batches(&executor, 2 * world_size, 0);
                    let plan =
                        StepPlan { step: number, lr: 3e-3, grad_norm: GradNorm::Measure, has_loss: true };
                    executor.run(plan, &mut batches.into_iter()).unwrap().loss
                };
                let losses: Vec<f64> = (1..=60).map(run).collect();
                executor.check_replicas().unwrap();
                losses
            });
            assert!(losses.iter().all(|rank| *rank == losses[0]), "ranks agree");
            let (first, last) = (losses[0][0], losses[0][59]);
            assert!(last < 0.9 * first, "{schedule:?}, {world_size} workers: {first} to {last}");
        }
    }
}

#[test]
fn bytes_on_the_wire_are_those_of_the_formulas() {
    // The algorithm that sends the fewest bytes for messages of any length.
    let algorithm = Some(FlatAlgorithm::HalvingDoubling.into());
    for world_size in [2, 4] {
        let options = GroupOptions { algorithm, ..GroupOptions::default() };
        on_threads(inproc_world_with(world_size, &options), &check_bytes);
    }
}

fn check_bytes(group: Group) {
    let world_size = group.world_size();
    let mut executor = executor(group, ONE_BIT_ADAM, one_bit(), LossScaling::Off);
    for number in 1..=6 {
        let before = executor.group().statistics().payload_bytes;
        let found = step(&mut executor, number).compression.unwrap();
        let sent = executor.group().statistics().payload_bytes - before;
        let lens = executor.model().table().units().iter().map(|unit| unit.num_elements);
        let whole: usize = lens.clone().map(|len| 2 * (world_size - 1) * 4 * len / world_size).sum();
        let message = |len: usize| len.div_ceil(8) + 8 * len.div_ceil(BLOCK_LEN);
        let one_bit: usize = lens.clone().map(|len| (world_size - 1) * message(len)).sum();
        let expected = if number <= 3 { whole } else { one_bit } as u64;
        // The ranks' blocks of a message differ by up to an element. Losses are f64.
        let slack = (8 * lens.count() + 64) as u64;
        assert!(
            sent.abs_diff(expected) <= slack,
            "step {number}, {world_size} workers: {sent}, not {expected}"
        );
        assert!(found.bytes_sent.abs_diff(expected) <= slack, "step {number}: {found:?}, not {expected}");
        assert!(found.bytes_uncompressed.abs_diff(whole as u64) <= slack);
        assert_eq!(found.error_norm > 0.0, number > 3);
    }
    assert!(executor.compressors().all(|(_, compressor)| compressor.step() == 3));
}

#[test]
fn a_step_that_overflows_leaves_all_as_it_was() {
    let default =
        |codec| Compression::new(&CompressionOptions { codec, ..CompressionOptions::default() }).unwrap();
    for compression in [one_bit()].into_iter().chain(CodecName::ALL.map(default)) {
        // In the last case, the skipped step exchanges the momentum of the last unit and the gradients of the other units.
        for (schedule, before_overflow, last_start) in
            [(ONE_BIT_ADAM, 1, 0), (ONE_BIT_ADAM, 5, 0), (ZERO_ONE_ADAM, 4, 1)]
        {
            let run = |overflows: bool| {
                run_ranks(2, |group| {
                    let mut executor = executor(group, schedule, compression, dynamic(4));
                    step(&mut executor, 1);
                    let last = executor.model().table().units().last().unwrap().parameters.clone();
                    last.for_each(|index| executor.optimizer_mut().set_state_start(index, last_start));
                    for number in 2..=before_overflow {
                        step(&mut executor, number);
                    }
                    if overflows {
                        overflow(&mut executor, before_overflow + 1);
                    }
                    // A skipped step counts in the schedule, but not as an update.
                    let skipped = u64::from(overflows);
                    for number in before_overflow + 1..=before_overflow + 3 {
                        let batches = batches(&executor, 4, number);
                        let plan = StepPlan {
                            step: number + skipped,
                            lr: 3e-3,
                            grad_norm: GradNorm::Measure,
                            has_loss: true,
                        };
                        let outcome = executor.run(plan, &mut batches.into_iter()).unwrap();
                        assert_eq!(outcome.skipped, None);
                    }
                    executor.check_replicas().unwrap();
                    (parameter_bits(&executor), moments(&executor), compressor_bits(&executor))
                })
            };
            assert!(run(true) == run(false), "{compression}, {schedule:?}, after {before_overflow} steps");
        }
    }
}

#[test]
fn gradients_that_overflow_in_f16_are_found_in_the_sums() {
    let options = ExecutorOptions {
        precision: Precision::F16,
        compression: one_bit(),
        // The scale grows in every step until the next overflow.
        loss_scaling: LossScaling::Dynamic { initial: 1 << 14, growth_interval: 1 },
        determinism: Determinism::Run,
        ..OPTIONS
    };
    let optimizer = ONE_BIT_ADAM;
    let skipped = run_ranks(2, |group| {
        let layout = Layout { options, optimizer, ..Layout::default() };
        let mut executor = executor_with_layout(&model(), group, 1, 2, &layout);
        let mut skipped = Vec::new();
        for number in 1..=30 {
            let found = |executor: &Executor| {
                (parameter_bits(executor), moments(executor), compressor_bits(executor))
            };
            let before = found(&executor);
            let outcome = step(&mut executor, number);
            assert!(outcome.loss.is_finite());
            if outcome.skipped.is_some() {
                assert!(found(&executor) == before, "step {number} left something behind");
                skipped.push((number, outcome.skipped));
            }
        }
        executor.check_replicas().unwrap();
        skipped
    });
    assert_eq!(skipped[0], skipped[1], "ranks agree");
    let late = skipped[0].iter().filter(|(number, _)| *number > 10);
    assert!(late.clone().count() > 2 && late.count() < 20, "{skipped:?}");
    assert!(
        skipped[0].iter().all(|(_, what)| *what == Some(Skipped::Overflow(NonFinite::GradNorm))),
        "{skipped:?}"
    );
}

/// Runs a step in which the second rank's activations and gradients are NaN.
fn overflow(executor: &mut Executor, number: u64) {
    let found =
        |executor: &Executor| (parameter_bits(executor), moments(executor), compressor_bits(executor));
    let before = found(executor);
    let is_spoilt = executor.group().rank().0 == 1;
    let first = shard_values(executor, 0)[0];
    if is_spoilt {
        change_shard(executor, 0, |values| values[0] = f32::NAN);
    }
    let mut batches = batches(executor, 4, number);
    let mut tokens = batches[0].take(TOKENS).unwrap();
    executor.device().zero(tokens.view_mut());
    batches[0].push(TOKENS, tokens);
    let plan = StepPlan { step: number, lr: 3e-3, grad_norm: GradNorm::Measure, has_loss: true };
    let outcome = executor.run(plan, &mut batches.into_iter()).unwrap();
    assert_eq!(outcome.skipped, Some(Skipped::Overflow(NonFinite::Loss)), "all ranks see it");
    if is_spoilt {
        change_shard(executor, 0, |values| values[0] = first);
    }
    assert!(found(executor) == before, "step {number} left something behind");
}

#[test]
fn the_loss_scale_changes_no_bits() {
    let run = |loss_scaling| {
        run_ranks(2, |group| {
            let mut executor = executor(group, ONE_BIT_ADAM, one_bit(), loss_scaling);
            for number in 1..=8 {
                step(&mut executor, number);
            }
            (parameter_bits(&executor), compressor_bits(&executor))
        })
    };
    let growing = LossScaling::Dynamic { initial: 4, growth_interval: 1 };
    assert!(run(growing) == run(LossScaling::Off));
}
