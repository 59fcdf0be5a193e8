//! Gradients that are compressed before they are sent: fewer bytes, approximate sums, and a loss that decreases.

use crate::common::{
    OPTIONS, SHAPE, batches, change_shard, dynamic, executor, parameter_bits, shard_values, train,
};
use trireme_base::Rank;
use trireme_codec::{CodecName, Compression, CompressionOptions};
use trireme_comm::{Group, GroupOptions, JoinOptions, TransportChoice, inproc_world_with, join};
use trireme_model::{Batch, ModelConfig, TOKENS};
use trireme_optim::LossScaling;
use trireme_parallel::{
    Determinism, Executor, ExecutorOptions, GradNorm, NonFinite, Skipped, StepOutcome, StepPlan,
};
use trireme_schedule::collective::FlatAlgorithm;
use trireme_tensor::Category;
use trireme_testkit::{on_threads, random_batch, run_ranks, small_models};

/// The rank of the low-rank codec: small enough that it saves bytes on the matrices of small models.
const RANK: usize = 2;
const RATIO: f64 = 0.05;
const BLOCK_LEN: usize = 128;

/// Returns a compression by `codec` that saves bytes in a world of four.
fn compression(codec: CodecName) -> Compression {
    let has = |option| codec.options().contains(&option);
    let options = CompressionOptions {
        codec,
        rank: has("rank").then_some(RANK),
        ratio: has("ratio").then_some(RATIO),
        block_len: has("block_len").then_some(BLOCK_LEN),
        ..CompressionOptions::default()
    };
    Compression::new(&options).unwrap()
}

fn options(compression: Compression) -> ExecutorOptions {
    ExecutorOptions { compression, determinism: Determinism::Run, ..OPTIONS }
}

/// The Llama model, whose embedding and output layer are not tied.
fn model() -> ModelConfig {
    small_models()[1].clone()
}

fn step(executor: &mut Executor, number: u64, batches: Vec<Batch>) -> StepOutcome {
    let plan = StepPlan { step: number, lr: 3e-3, grad_norm: GradNorm::Measure, has_loss: true };
    executor.run(plan, &mut batches.into_iter()).unwrap()
}

/// Returns the same two microbatches on every rank, for every step.
fn equal_batches(executor: &Executor) -> Vec<Batch> {
    let vocab_size = crate::common::vocab_size(executor);
    (0..2).map(|index| random_batch(executor.device(), SHAPE, vocab_size, 0, index)).collect()
}

#[test]
fn the_loss_falls_with_every_codec() {
    for codec in CodecName::ALL {
        for world_size in [2, 4] {
            let losses = run_ranks(world_size, |group| {
                let mut executor = executor(&model(), group, 1, 1, options(compression(codec)));
                // Each rank has its own data, the same in every step.
                let mut run = |number| {
                    let batch = batches(&executor, world_size, 0);
                    step(&mut executor, number, batch).loss
                };
                let losses: Vec<f64> = (1..=60).map(&mut run).collect();
                executor.check_replicas().unwrap();
                losses
            });
            assert!(losses.iter().all(|rank| *rank == losses[0]), "{codec}: ranks agree");
            let (first, last) = (losses[0][0], losses[0][59]);
            assert!(last < 0.9 * first, "{codec}, {world_size} workers: {first} to {last}");
        }
    }
}

#[test]
fn a_world_of_one_has_nothing_to_compress() {
    let run = |compression| {
        let mut executor = executor(&model(), trireme_comm::single(), 1, 2, options(compression));
        let outcomes = [1, 2].map(|number| {
            let batch = batches(&executor, 2, number);
            let outcome = step(&mut executor, number, batch);
            (outcome.loss.to_bits(), outcome.grad_norm.map(f64::to_bits))
        });
        assert_eq!(executor.compressors().count(), 0);
        (outcomes, parameter_bits(&executor))
    };
    let expected = run(Compression::none());
    for codec in CodecName::ALL {
        assert!(run(compression(codec)) == expected, "{codec}");
    }
}

/// Returns the bytes that a rank sends for a bucket by the formulas of `docs/compression.md`. `matrices` are pairs of rows and columns.
fn formula(codec: CodecName, world_size: usize, len: usize, matrices: &[(usize, usize)]) -> usize {
    let (n, k) = (world_size, ((RATIO * len as f64).round() as usize).max(1));
    let all_reduce = |message: usize| (2 * message * (n - 1)).div_ceil(n);
    let all_gather = |message: usize| message * (n - 1);
    let blocks = len.div_ceil(BLOCK_LEN);
    let compressed = match codec {
        CodecName::None => all_reduce(4 * len),
        CodecName::F16 | CodecName::Bf16 => all_reduce(2 * len),
        CodecName::Fp8E4m3 | CodecName::Fp8E5m2 => all_gather(len + 4),
        CodecName::Int8 => all_gather(len + 4 * blocks),
        CodecName::Int4 => all_gather(len.div_ceil(2) + 4 * blocks),
        CodecName::OneBit => all_gather(len.div_ceil(8) + 8 * blocks),
        CodecName::TopK => all_gather(8 * k),
        CodecName::RandomK => all_reduce(4 * k),
        CodecName::PowerSgd => {
            let gains = |&&(rows, cols): &&(usize, usize)| RANK * (rows + cols) < rows * cols;
            let factored = || matrices.iter().filter(gains);
            let plain = len - factored().map(|(rows, cols)| rows * cols).sum::<usize>();
            let [p, q] =
                [factored().map(|m| RANK * m.0).sum(), factored().map(|m| RANK * m.1).sum::<usize>()];
            all_reduce(4 * p) + all_reduce(4 * (q + plain))
        }
    };
    compressed.min(all_reduce(4 * len))
}

#[test]
fn bytes_on_the_wire_are_those_of_the_formulas() {
    // The algorithm that sends the fewest bytes for messages of any length.
    let algorithm = Some(FlatAlgorithm::HalvingDoubling.into());
    let group_options = GroupOptions { algorithm, ..GroupOptions::default() };
    for codec in CodecName::ALL {
        for world_size in [2, 4] {
            on_threads(inproc_world_with(world_size, &group_options), &|group| check_bytes(group, codec));
        }
    }
}

fn check_bytes(group: Group, codec: CodecName) {
    let world_size = group.world_size();
    let mut executor = executor(&model(), group, 1, 1, options(compression(codec)));
    for number in 1..=2 {
        let before = executor.group().statistics().payload_bytes;
        let batch = batches(&executor, world_size, number);
        let found = step(&mut executor, number, batch).compression;
        let sent = executor.group().statistics().payload_bytes - before;
        let table = executor.model().table();
        let unit_bytes = |codec| {
            table.units().iter().map(move |unit| {
                let dims = table.parameters()[unit.parameters.clone()].iter().map(|p| p.shape.dims());
                let matrices: Vec<_> = dims.filter_map(|dims| Some((dims[0], *dims.get(1)?))).collect();
                formula(codec, world_size, unit.num_elements, &matrices) as u64
            })
        };
        let expected: u64 = unit_bytes(codec).sum();
        // The ranks' blocks of a message differ by up to an element, in each of up to two messages per unit. The loss is an f64.
        let slack = (2 * 8 * table.units().len() + 16) as u64;
        assert!(sent.abs_diff(expected) <= slack, "{codec}, {world_size} workers: {sent}, not {expected}");
        let uncompressed: u64 = unit_bytes(CodecName::None).sum();
        match found {
            None => assert_eq!(codec, CodecName::None),
            Some(found) => {
                assert_eq!((found.bytes_sent, found.bytes_uncompressed), (expected, uncompressed), "{codec}");
                assert!(10 * expected < 9 * uncompressed, "{codec} saves something: {expected}");
            }
        }
    }
}

#[test]
fn the_error_norm_is_of_the_unsent_part_of_the_gradient() {
    // All ranks have the same gradient, so the gradient norm with TopK is the norm of the elements that were sent.
    let run = |codec, loss_scaling| {
        run_ranks(2, |group| {
            let options = ExecutorOptions { loss_scaling, ..options(compression(codec)) };
            let mut executor = executor(&model(), group, 1, 2, options);
            let batches = equal_batches(&executor);
            let outcome = step(&mut executor, 1, batches);
            (outcome.grad_norm.unwrap(), outcome.compression.map(|found| f64::from(found.error_norm)))
        })
        .remove(0)
    };
    let (whole, nothing) = run(CodecName::None, LossScaling::Off);
    assert_eq!(nothing, None);
    for loss_scaling in [LossScaling::Off, LossScaling::Static(1 << 10)] {
        let (sent, error) = run(CodecName::TopK, loss_scaling);
        let error = error.unwrap();
        assert!(error > 0.1 * whole && sent > 0.1 * whole, "{sent} and {error} of {whole}");
        let together = sent.hypot(error);
        assert!((together / whole - 1.0).abs() < 1e-4, "{sent} and {error} are {together} of {whole}");
    }
}

#[test]
fn the_loss_scale_changes_no_bits_whenever_it_grows() {
    let with_momentum = CompressionOptions {
        codec: CodecName::TopK,
        ratio: Some(RATIO),
        momentum: Some(0.5),
        ..CompressionOptions::default()
    };
    let normalized = CompressionOptions {
        codec: CodecName::OneBit,
        normalize: Some(0.95),
        ..CompressionOptions::default()
    };
    let codecs = [CodecName::OneBit, CodecName::RandomK, CodecName::PowerSgd].map(compression);
    let others = [with_momentum, normalized].map(|options| Compression::new(&options).unwrap());
    for compression in codecs.into_iter().chain(others) {
        let run = |loss_scaling| {
            let options = ExecutorOptions { loss_scaling, ..options(compression) };
            run_ranks(2, |group| train(executor(&model(), group, 1, 2, options), 4)).remove(0)
        };
        let unscaled = run(LossScaling::Off);
        let growing = LossScaling::Dynamic { initial: 4, growth_interval: 1 };
        for scaling in [LossScaling::Static(1 << 10), growing] {
            assert!(run(scaling) == unscaled, "{compression}, {scaling:?}");
        }
    }
}

#[test]
fn a_step_that_overflows_is_skipped_and_leaves_nothing_behind() {
    for codec in CodecName::ALL {
        run_ranks(2, |group| {
            let options = ExecutorOptions { loss_scaling: dynamic(256), ..options(compression(codec)) };
            let mut executor = executor(&model(), group, 1, 1, options);
            let rank = executor.group().rank().0;
            // On one rank, all activations and gradients of the first step are NaN.
            let first = shard_values(&executor, 0)[0];
            if rank == 1 {
                change_shard(&mut executor, 0, |values| values[0] = f32::NAN);
            }
            let mut batch = batches(&executor, 2, 1);
            let mut tokens = batch[0].take(TOKENS).unwrap();
            executor.device().zero(tokens.view_mut());
            batch[0].push(TOKENS, tokens);
            let outcome = step(&mut executor, 1, batch);
            assert_eq!(outcome.skipped, Some(Skipped::Overflow(NonFinite::Loss)), "{codec}");
            assert!(!outcome.grad_norm.unwrap().is_finite(), "{codec}: all ranks see it");
            if rank == 1 {
                change_shard(&mut executor, 0, |values| values[0] = first);
            }
            let batch = batches(&executor, 2, 2);
            let outcome = step(&mut executor, 2, batch);
            assert_eq!(outcome.skipped, None, "{codec}");
            assert!(outcome.loss.is_finite() && outcome.grad_norm.unwrap().is_finite(), "{codec}");
        });
    }
}

#[test]
fn memory_is_counted_and_freed_after_a_warm_up() {
    let memory = |codec, warmup_steps| {
        run_ranks(2, |group| {
            let options_of_codec =
                CompressionOptions { codec, warmup_steps, ..CompressionOptions::default() };
            let compression = Compression::new(&options_of_codec).unwrap();
            let mut executor = executor(&model(), group, 1, 1, options(compression));
            let usage = |executor: &Executor| executor.device().memory().usage(Category::Communication);
            let mut found = vec![usage(&executor).current];
            for number in 1..=4 {
                let batch = batches(&executor, 2, number);
                step(&mut executor, number, batch);
                found.push(usage(&executor).current);
            }
            (found, executor.model().table().num_elements())
        })
        .remove(0)
    };
    let (one_bit, num_elements) = memory(CodecName::OneBit, None);
    assert!(one_bit.iter().all(|bytes| *bytes == one_bit[0]), "{one_bit:?}");
    // The residual, and the messages of two ranks: an eighth of a byte per element, and scales.
    let bytes_min = 4 * num_elements + 2 * num_elements / 8;
    assert!((bytes_min..bytes_min + num_elements / 8).contains(&one_bit[0]), "{one_bit:?} of {num_elements}");
    for codec in [CodecName::OneBit, CodecName::TopK, CodecName::PowerSgd] {
        let ((without, _), (with, _)) = (memory(codec, None), memory(codec, Some(2)));
        // After the warm-up, from the third step on, messages are compressed.
        assert!(with[0] > without[0] && with[2] > without[2], "{codec}: {with:?}, {without:?}");
        assert_eq!(with[3..], without[3..], "{codec}");
    }
}

/// Runs a world of two threads that connect by a rendezvous, as processes do.
fn run_joined<T: Send>(transport: TransportChoice, rank: impl Fn(Group) -> T + Sync) -> Vec<T> {
    // A loopback address that no other process of these tests uses.
    let [.., high, low] = std::process::id().to_be_bytes();
    let options = |rank| JoinOptions {
        master_addr: format!("127.{high}.{low}.1"),
        transport,
        ..JoinOptions::new(Rank(rank), 2)
    };
    on_threads(vec![0, 1], &|number| rank(join(&options(number)).unwrap()))
}

#[test]
fn every_transport_gives_the_same_bits() {
    for codec in [CodecName::F16, CodecName::Int8, CodecName::TopK, CodecName::PowerSgd] {
        let run = |group| train(executor(&model(), group, 1, 2, options(compression(codec))), 4);
        let expected = run_ranks(2, run);
        for transport in [TransportChoice::Shm, TransportChoice::Tcp] {
            assert!(run_joined(transport, run) == expected, "{codec}, {transport:?}");
        }
    }
}
