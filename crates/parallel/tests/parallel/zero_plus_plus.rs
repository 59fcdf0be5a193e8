//! ZeRO++: how much traffic between hosts it saves, and how it changes results.

use crate::common::{Layout, OPTIONS, batches, dynamic, executor_with_layout};
use trireme_model::ModelConfig;
use trireme_parallel::{Executor, ExecutorOptions, GradNorm, NonFinite, Skipped, StepPlan, ZeroPlusPlus};
use trireme_schedule::{Action, StateLayout};
use trireme_tensor::{Category, IntegerFormat, Precision};
use trireme_testkit::{run_ranks_on, small_models};

const HPZ: ZeroPlusPlus = ZeroPlusPlus { secondary_shards: true, ..ZeroPlusPlus::NONE };
const QWZ: ZeroPlusPlus = ZeroPlusPlus { quantized_weights: true, ..ZeroPlusPlus::NONE };

const fn qgz(format: IntegerFormat) -> ZeroPlusPlus {
    ZeroPlusPlus { quantized_gradients: Some(format), ..ZeroPlusPlus::NONE }
}

const fn all(format: IntegerFormat) -> ZeroPlusPlus {
    ZeroPlusPlus { quantized_weights: true, secondary_shards: true, quantized_gradients: Some(format) }
}

/// Returns a layout of ZeRO-3 with these methods.
fn zero3_layout(methods: ZeroPlusPlus, options: ExecutorOptions, num_shards: usize) -> Layout<'static> {
    let options = ExecutorOptions { zero_plus_plus: methods, ..options };
    Layout { options, num_shards, state: StateLayout::zero(3), ..Layout::default() }
}

/// Returns the losses and norms of some steps, and then the loss of an evaluation. If `repeats`, all steps see the same batch.
fn train(executor: &mut Executor, num_microbatches: usize, num_steps: u64, repeats: bool) -> Vec<f64> {
    let mut found = Vec::new();
    for step in 1..=num_steps {
        let batches = batches(executor, num_microbatches, if repeats { 1 } else { step });
        let plan = StepPlan { step, lr: 1e-2, grad_norm: GradNorm::Clip(0.5), has_loss: true };
        let outcome = executor.run(plan, &mut batches.into_iter()).unwrap();
        assert_eq!(outcome.skipped, None, "step {step}");
        found.extend([outcome.loss, outcome.grad_norm.unwrap()]);
    }
    let batch = (executor.group().rank().0 == 0)
        .then(|| batches(executor, executor.group().world_size(), 99).remove(0));
    let evaluated = executor.evaluate(batch).unwrap()[0].sum;
    let evaluated = executor.group().all_gather_bytes(&evaluated.to_le_bytes()).wait().unwrap();
    found.push(f64::from_le_bytes(evaluated[0][..].try_into().unwrap()));
    executor.check_replicas().unwrap();
    found
}

/// Returns the results of rank 0 and the bits of all parameters. Losses and norms must be the same on all ranks.
fn run(
    config: &ModelConfig,
    layout: &Layout<'_>,
    hosts: &[usize],
    num_microbatches: usize,
    num_steps: u64,
    repeats: bool,
) -> (Vec<f64>, Vec<u32>) {
    let mut ranks = run_ranks_on(hosts, |group| {
        let mut executor = executor_with_layout(config, group, 1, num_microbatches / hosts.len(), layout);
        let found = train(&mut executor, num_microbatches, num_steps, repeats);
        let weights = executor.gather_parameters().unwrap();
        let flat = |unit| weights.as_ref().map_or_else(Vec::new, |all| all.values(unit).unwrap());
        (found, (0..executor.model().num_units()).flat_map(flat).map(f32::to_bits).collect())
    });
    let first = ranks.remove(0);
    assert!(ranks.iter().all(|(found, _)| *found == first.0), "ranks agree");
    first
}

#[test]
fn secondary_shards_have_the_bits_of_plain_data_parallelism() {
    let bf16 = ExecutorOptions { precision: Precision::Bf16, ..OPTIONS };
    let f16 = ExecutorOptions { precision: Precision::F16, loss_scaling: dynamic(256), ..OPTIONS };
    for options in [OPTIONS, bf16, f16] {
        for config in small_models() {
            for num_microbatches in [4, 8] {
                let plain = Layout { options, ..Layout::default() };
                let oracle = run(&config, &plain, &[0], num_microbatches, 3, false);
                for place in [(&[0, 0, 1, 1], 4), (&[0, 1, 0, 1], 4), (&[0, 1, 2, 3], 4), (&[0, 1, 0, 1], 2)]
                {
                    let layout = zero3_layout(HPZ, options, place.1);
                    let found = run(&config, &layout, place.0, num_microbatches, 3, false);
                    assert!(found == oracle, "{place:?}, {num_microbatches}, {}", options.precision);
                }
            }
        }
    }
}

/// In an evaluation, ranks without a batch take part in gathers of two levels. The gather of a tied embedding spans the gathers of other
/// units.
#[test]
fn ranks_without_a_batch_await_gathers_in_the_same_order() {
    for config in small_models() {
        let found = [false, true].map(|keep_gathered| {
            let mut layout = zero3_layout(QWZ, OPTIONS, 4);
            layout.state.keep_gathered = keep_gathered;
            run(&config, &layout, &[0, 0, 1, 1], 4, 2, false)
        });
        assert!(found[0] == found[1]);
    }
}

#[test]
fn integers_train_as_floats_do() {
    const NUM_STEPS: u64 = 30;
    for config in small_models() {
        for precision in [Precision::F32, Precision::Bf16] {
            let options = ExecutorOptions { precision, ..OPTIONS };
            let losses = |methods| {
                let layout = zero3_layout(methods, options, 4);
                let run = || run(&config, &layout, &[0, 0, 1, 1], 4, NUM_STEPS, true);
                let found = run();
                assert!(run() == found, "{methods:?}: a second run has the same bits");
                Vec::from_iter(found.0[..2 * NUM_STEPS as usize].iter().copied().step_by(2))
            };
            let plain = losses(ZeroPlusPlus::NONE);
            let (int8, int4) = (IntegerFormat::Int8, IntegerFormat::Int4);
            // Tolerances of the losses, as a fraction of the first loss.
            let cases =
                [(QWZ, 0.02), (qgz(int8), 0.02), (all(int8), 0.02), (qgz(int4), 0.05), (all(int4), 0.05)];
            for (methods, tolerance) in cases {
                let found = losses(methods);
                assert!(found[NUM_STEPS as usize - 1] < 0.15 * found[0], "{methods:?}: {found:?}");
                for (step, (found, expected)) in found.iter().zip(&plain).enumerate() {
                    let is_near = (found - expected).abs() <= tolerance * plain[0];
                    assert!(is_near, "{methods:?}, {precision}, step {step}: {found} instead of {expected}");
                }
            }
        }
    }
}

#[test]
fn ranks_agree_wherever_they_are() {
    let int4 = IntegerFormat::Int4;
    let hosts: [(&[usize], usize); 6] = [
        (&[0, 0], 2),
        (&[0, 1], 2),
        (&[0, 0, 0], 3),
        (&[0, 1, 2], 3),
        (&[0, 1, 0, 1], 4),
        (&[0, 0, 1, 1], 2),
    ];
    for config in small_models() {
        for place in hosts {
            let num_microbatches = 2 * place.0.len();
            let [plain, found] = [ZeroPlusPlus::NONE, all(int4)]
                .map(|methods| zero3_layout(methods, OPTIONS, place.1))
                .map(|layout| run(&config, &layout, place.0, num_microbatches, 2, false).0);
            // Losses and norms alternate.
            for ((plain, found), tolerance) in plain.iter().zip(&found).zip([0.02, 0.1].into_iter().cycle()) {
                assert!((plain - found).abs() < tolerance * plain, "{place:?}: {found} instead of {plain}");
            }
            assert!(plain != found, "{place:?}: something is rounded");
        }
        let alone = |methods| run(&config, &zero3_layout(methods, OPTIONS, 1), &[0], 2, 2, false);
        assert!(alone(all(int4)) == alone(ZeroPlusPlus::NONE), "a rank alone rounds nothing");
    }
}

#[test]
fn overflows_are_detected_in_integers() {
    let f16 = ExecutorOptions { precision: Precision::F16, loss_scaling: dynamic(1 << 24), ..OPTIONS };
    for format in [IntegerFormat::Int8, IntegerFormat::Int4] {
        let layout = zero3_layout(all(format), f16, 4);
        let skipped = run_ranks_on(&[0, 0, 1, 1], |group| {
            let mut executor = executor_with_layout(&small_models()[0], group, 1, 1, &layout);
            let plan = StepPlan { step: 1, lr: 1e-2, grad_norm: GradNorm::Clip(0.5), has_loss: true };
            let batches = batches(&executor, 4, 1);
            executor.run(plan, &mut batches.into_iter()).unwrap().skipped
        });
        assert_eq!(skipped, [Some(Skipped::Overflow(NonFinite::GradNorm)); 4], "{format:?}");
    }
}

/// Runs a step on two hosts with two ranks each. Returns the bytes sent between hosts, the bytes by the formulas of docs/zero.md, the bytes
/// of plain ZeRO-3 in two levels, and the bytes of parameters per element that a rank stores.
fn traffic_across_hosts(methods: ZeroPlusPlus, options: ExecutorOptions) -> (f64, f64, f64, f64) {
    let text = r#"{"model_type": "gpt2", "vocab_size": 700, "n_positions": 64, "n_embd": 128, "n_layer": 2, "n_head": 4}"#;
    let config = ModelConfig::from_json(text).unwrap();
    let layout = zero3_layout(methods, options, 4);
    let ranks = run_ranks_on(&[0, 0, 1, 1], |group| {
        let mut executor = executor_with_layout(&config, group, 1, 1, &layout);
        let before = executor.ranks().payload_bytes_across().unwrap();
        let plan = StepPlan { step: 1, lr: 1e-2, grad_norm: GradNorm::Clip(0.5), has_loss: true };
        let batches = batches(&executor, 4, 1);
        executor.run(plan, &mut batches.into_iter()).unwrap();
        executor.group().barrier().wait().unwrap();
        let sent = executor.ranks().payload_bytes_across().unwrap() - before;
        let units = executor.model().table().units();
        let (mut formula, mut plain) = (0.0, 0.0);
        let mut gathered = vec![false; units.len()];
        for action in &executor.program().actions {
            let elements = units[action.unit()].padded_len() as f64;
            // Each of the four ranks sends one message with its shard to the other host.
            let packed =
                |format: IntegerFormat| format.num_bytes(units[action.unit()].padded_len() / 4) as f64 * 4.0;
            match action {
                Action::Unshard { unit } => {
                    plain += 2.0 * elements;
                    if !std::mem::replace(&mut gathered[*unit], methods.secondary_shards) {
                        formula += packed(IntegerFormat::Int8);
                    }
                }
                Action::ReduceGrad { .. } => {
                    plain += 4.0 * elements;
                    formula += packed(methods.quantized_gradients.unwrap());
                }
                _ => (),
            }
        }
        let kept = executor.device().memory().usage(Category::Parameters).current as f64;
        (sent as f64, formula, plain, kept / executor.model().table().num_elements() as f64)
    });
    let sent = ranks.iter().map(|rank| rank.0).sum();
    (sent, ranks[0].1, ranks[0].2, ranks[0].3)
}

#[test]
fn traffic_between_hosts_follows_the_formulas() {
    let bf16 = ExecutorOptions { precision: Precision::Bf16, ..OPTIONS };
    for (format, factor) in [(IntegerFormat::Int8, 3.5), (IntegerFormat::Int4, 4.5)] {
        let (sent, formula, plain, kept) = traffic_across_hosts(all(format), bf16);
        assert_eq!(sent, formula, "{format:?}");
        assert!(plain / sent > factor, "{format:?}: {sent} bytes instead of {plain}");
        // A secondary shard has half of a unit, in bf16. The shard that the rank updates, a quarter of a unit in f32, counts as optimizer
        // state.
        assert!((kept - 1.0).abs() < 0.05, "{kept} bytes an element");
        let methods = ZeroPlusPlus { secondary_shards: false, ..all(format) };
        let (sent, formula, _, kept) = traffic_across_hosts(methods, bf16);
        assert_eq!((sent, kept), (formula, 0.0), "{format:?}");
    }
}
