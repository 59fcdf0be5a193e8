//! Expert parallelism: the bits equal the bits of one rank, except where the order of sums differs.

use crate::common::{ADAMW, Layout, OPTIONS, Pipeline, SHAPE, batches, executor_with_layout};
use std::sync::Arc;
use trireme_codec::{CodecName, Compression, CompressionOptions};
use trireme_comm::{Group, GroupOptions, inproc_world_on};
use trireme_model::{ExchangeConfig, ModelConfig};
use trireme_parallel::{Determinism, Executor, ExecutorOptions, GradNorm, ParallelError, StepPlan};
use trireme_schedule::collective::{Algorithm, FlatAlgorithm};
use trireme_schedule::pipeline::ScheduleKind;
use trireme_schedule::{Keep, StateClass, StateLayout, Tier};
use trireme_tensor::{BackendKind, Category, DetachedOptions, ParameterClass, ParameterInfo, Precision};
use trireme_testkit::{on_threads, random_batch, run_ranks};

/// Relative difference of losses where ranks sum in another order.
const LOSS_TOLERANCE: f64 = 1e-5;

const MICROBATCHES: usize = 4;

pub(crate) fn models() -> Vec<ModelConfig> {
    let mixtral = r#"{"model_type": "mixtral", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 20,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
        "max_position_embeddings": 32, "num_local_experts": 4, "router_z_loss_coef": 0.01, "router_aux_loss_coef": 0.02}"#;
    let deepseek = r#"{"model_type": "deepseek_v3", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 32,
        "q_lora_rank": 10, "kv_lora_rank": 12, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 5,
        "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 8,
        "first_k_dense_replace": 1}"#;
    let mut models = [mixtral, mixtral, deepseek].map(|text| ModelConfig::from_json(text).unwrap());
    // The capacity is computed per sample, so that any number of ranks drops the same tokens.
    models[1].experts.as_mut().unwrap().capacity_factor = Some(0.75);
    // The first model sends two chunks with equally many experts, the second a single chunk, and the third chunks with different numbers of
    // experts. The first has no shadowed experts.
    for (model, (num_chunks, num_shadowed)) in models.iter_mut().zip([(2, 0), (1, 1), (3, 3)]) {
        let experts = model.experts.as_mut().unwrap();
        experts.exchange = ExchangeConfig { num_chunks, num_shadowed };
    }
    models.into()
}

/// The losses and norms of the steps, as bits, and all parameters at the end.
type RunResult = (Vec<[u64; 2]>, Vec<(String, Vec<u32>)>);

fn train(config: &ModelConfig, group: Group, accumulation: usize, layout: &Layout<'_>) -> RunResult {
    let mut executor = executor_with_layout(config, group, 1, accumulation, layout);
    let mut steps = Vec::new();
    for step in 1..=3 {
        let batches = batches(&executor, MICROBATCHES, step);
        let plan = StepPlan { step, lr: 1e-2, grad_norm: GradNorm::Measure, has_loss: true };
        let outcome = executor.run(plan, &mut batches.into_iter()).unwrap();
        steps.push([outcome.loss.to_bits(), outcome.grad_norm.unwrap_or_default().to_bits()]);
    }
    executor.check_replicas().unwrap();
    let all = executor.gather_parameters().unwrap();
    let parameters = all.map_or_else(Vec::new, |all| {
        let table = Arc::clone(all.table());
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect();
        let of =
            |info: &ParameterInfo| (info.name.clone(), bits(&all.values(info.unit).unwrap()[info.range()]));
        let mut found: Vec<(String, Vec<u32>)> = table.parameters().iter().map(of).collect();
        found.sort();
        found
    });
    (steps, parameters)
}

fn run(config: &ModelConfig, num_ranks: usize, accumulation: usize, layout: &Layout<'_>) -> RunResult {
    let found = run_ranks(num_ranks, |group| train(config, group, accumulation, layout));
    assert!(found.iter().all(|(steps, _)| *steps == found[0].0), "all ranks come to the same");
    found.into_iter().next().unwrap()
}

fn check_near(found: &RunResult, oracle: &RunResult, what: &str) {
    for ([found, _], [expected, _]) in found.0.iter().zip(&oracle.0) {
        let (found, expected) = (f64::from_bits(*found), f64::from_bits(*expected));
        assert!((found / expected - 1.0).abs() < LOSS_TOLERANCE, "{what}: {found} instead of {expected}");
    }
}

fn plain() -> Layout<'static> {
    Layout { optimizer: ADAMW, ..Layout::default() }
}

#[test]
fn expert_parallelism_changes_no_bit() {
    let bf16 = ExecutorOptions { precision: Precision::Bf16, ..OPTIONS };
    let mut oracles = Vec::new();
    for config in models() {
        for options in [OPTIONS, bf16, ExecutorOptions { bf16_parameters: true, ..bf16 }] {
            let plain = Layout { options, ..plain() };
            let oracle = run(&config, 1, MICROBATCHES, &plain);
            let check = |num_ranks: usize, accumulation: usize, layout: Layout<'_>, what: &str| {
                let found = run(&config, num_ranks, accumulation, &layout);
                let what = format!("{:?} {what} in {}", config.family, options.precision);
                assert_eq!(found.0, oracle.0, "{what}");
                assert!(found.1 == oracle.1, "{what} has other parameters");
            };
            check(4, 1, Layout { experts: 2, ..plain.clone() }, "two of four");
            check(4, 1, Layout { experts: 4, ..plain.clone() }, "four");
            let sharded = |stage, num_shards, experts| Layout {
                state: StateLayout::zero(stage),
                num_shards,
                experts,
                ..plain.clone()
            };
            for stage in [1, 2, 3] {
                check(4, 1, sharded(stage, 4, 4), &format!("four, ZeRO-{stage}"));
                check(4, 1, sharded(stage, 2, 2), &format!("two, two replicas, ZeRO-{stage}"));
                check(4, 1, sharded(stage, 2, 4), &format!("four, two replicas, ZeRO-{stage}"));
            }
            check(2, 2, sharded(2, 2, 2), "two, ZeRO-2, two microbatches each");
            check(2, 2, sharded(3, 2, 2), "two, ZeRO-3, two microbatches each");
            let num_units = 2 + config.num_layers + config.experts.as_ref().unwrap().layers.len();
            let keeps: Vec<Keep> =
                (0..num_units).map(|unit| [Keep::All, Keep::Input, Keep::Products][unit % 3]).collect();
            check(4, 1, Layout { experts: 2, keeps: &keeps, ..plain.clone() }, "two of four, recomputed");
            let folder = std::env::temp_dir();
            let state = StateLayout::UNSHARDED.with_tier(StateClass::Activations, Tier::Disk);
            let stored = Layout { experts: 2, state, folder: &folder, ..plain.clone() };
            check(4, 1, stored, "two of four, activations on a disk");
            let backend = BackendKind::Detached(DetachedOptions { seed: 3, ignored_wait: None });
            check(2, 2, Layout { backend, ..sharded(2, 2, 2) }, "detached");
            oracles.push(oracle.0);
        }
    }
    assert_ne!(oracles[0], oracles[3], "the capacity drops something");
}

/// With equal logits, all tokens choose the first experts, so the number of exchanged rows is known.
#[test]
fn rows_and_states_take_the_bytes_of_the_formulas() {
    let mut config = models().swap_remove(0);
    config.initializer_range = 0.0;
    let (num_layers, num_experts, num_choices) = (2, 4, 2);
    // None, the first, or both of the two experts that tokens choose are shadowed.
    for (precision, num_shadowed) in
        [(Precision::F32, 0), (Precision::F32, 1), (Precision::Bf16, 0), (Precision::Bf16, 2)]
    {
        config.experts.as_mut().unwrap().exchange.num_shadowed = num_shadowed;
        for degree in [2, 4] {
            let options = ExecutorOptions { precision, ..OPTIONS };
            let layout = Layout { options, experts: degree, ..plain() };
            let (num_tokens, row_bytes) = (SHAPE.0 * SHAPE.1, config.hidden_size * precision.dtype().size());
            let owner = |expert: usize| expert / (num_experts / degree);
            run_ranks(degree, |group| {
                let rank = group.rank().0;
                let mut executor = executor_with_layout(&config, group, 1, 1, &layout);
                let sent = |executor: &Executor| {
                    executor.ranks().experts().expect("several ranks").statistics().message_bytes
                };
                let before = sent(&executor);
                let batches = batches(&executor, degree, 1);
                let plan = StepPlan { step: 1, lr: 1e-2, grad_norm: GradNorm::Clip(1.0), has_loss: true };
                executor.run(plan, &mut batches.into_iter()).unwrap();
                // Rows sent to experts on other ranks, and returned from experts on this rank, in forward and backward.
                let is_here = |expert: &usize| owner(*expert) == rank;
                let num_here = (num_shadowed..num_choices).filter(is_here).count();
                let there = num_choices - num_shadowed - num_here;
                let rows = 2 * num_layers * (there + num_here * (degree - 1)) * num_tokens;
                // The three matrices of a shadowed expert, in forward and backward. They are sent in f32, in which ranks store unsharded
                // parameters.
                let copied = (0..num_shadowed).filter(is_here).count() * (degree - 1);
                let copied = 2 * num_layers * copied * 3 * config.hidden_size * config.intermediate_size;
                let expected = rows * row_bytes + copied * size_of::<f32>();
                assert_eq!(sent(&executor) - before, expected as u64, "rank {rank} of {degree}");

                let table = executor.model().table();
                let of_experts: usize = table
                    .parameters()
                    .iter()
                    .filter(|info| info.expert.is_some())
                    .map(|info| info.full_shape.num_elements())
                    .sum();
                let all = table.full().num_elements();
                let own = all - of_experts + of_experts / degree;
                assert_eq!(table.num_elements(), own);
                let memory = executor.device().memory();
                let [gradients, optimizer] = [Category::Gradients, Category::Optimizer]
                    .map(|category| memory.usage(category).peak as f64 / own as f64);
                // In 16 bits, the optimizer stores master weights only if state is sharded.
                assert!((4.0..4.2).contains(&gradients), "{gradients} bytes an element");
                assert!((8.0..8.4).contains(&optimizer), "{optimizer} bytes an element");
            });
        }
    }
}

/// The experts with the highest loads of the previous step are shadowed. In the first step, no loads are known.
#[test]
fn experts_with_the_highest_loads_are_shadowed() {
    let mut config = models().swap_remove(0);
    config.experts.as_mut().unwrap().exchange.num_shadowed = 2;
    let sent_in_steps = run_ranks(2, |group| {
        let mut executor = executor_with_layout(&config, group, 1, 1, &Layout { experts: 2, ..plain() });
        let mut before = 0;
        let sent = (1..=3).map(|step| {
            let batches = batches(&executor, 2, 1);
            // Without updates, the same tokens choose the same experts in each step.
            let plan = StepPlan { step, lr: 0.0, grad_norm: GradNorm::Off, has_loss: true };
            executor.run(plan, &mut batches.into_iter()).unwrap();
            let sent = executor.ranks().experts().unwrap().statistics().message_bytes;
            sent - std::mem::replace(&mut before, sent)
        });
        sent.collect::<Vec<u64>>()
    });
    // Summed over both ranks, the bytes of matrices are the same for any choice of shadowed experts.
    let [first, second, third] =
        [0, 1, 2].map(|step| sent_in_steps.iter().map(|steps| steps[step]).sum::<u64>());
    assert_eq!(second, third);
    assert!(second < first, "{second} bytes with the highest loads, {first} with the first expert");
}

/// Returns the biases that balance experts after one step. The gradients of that step are computed at the initial parameters, so they do
/// not depend on updates of other parameters.
fn biases_after_a_step(config: &ModelConfig, options: ExecutorOptions) -> Vec<Vec<u32>> {
    let layout = Layout { options, ..plain() };
    let found = run_ranks(2, |group| {
        let mut executor = executor_with_layout(config, group, 1, 1, &layout);
        let batches = batches(&executor, 2, 1);
        let plan = StepPlan { step: 1, lr: 1e-2, grad_norm: GradNorm::Off, has_loss: true };
        executor.run(plan, &mut batches.into_iter()).unwrap();
        let all = executor.gather_parameters().unwrap()?;
        let biases = all.table().parameters().iter().filter(|info| info.class == ParameterClass::Balance);
        let bits = |info: &ParameterInfo| {
            all.values(info.unit).unwrap()[info.range()].iter().map(|value| value.to_bits()).collect()
        };
        Some(biases.map(bits).collect())
    });
    found.into_iter().flatten().next().unwrap()
}

#[test]
fn no_codec_rounds_counts_of_loads() {
    let config = &models()[2];
    let expected = biases_after_a_step(config, OPTIONS);
    assert!(expected.iter().flatten().any(|&bias| bias != 0), "loads are uneven");
    for codec in [CodecName::OneBit, CodecName::Fp8E4m3, CodecName::TopK] {
        let ratio = (codec == CodecName::TopK).then_some(0.01);
        let compression = CompressionOptions { codec, ratio, ..CompressionOptions::default() };
        let compression = Compression::new(&compression).unwrap();
        let options = ExecutorOptions { compression, determinism: Determinism::Run, ..OPTIONS };
        assert!(biases_after_a_step(config, options) == expected, "{codec}");
    }
}

/// The last batches of an evaluation may be smaller on some ranks. All ranks must still agree on the rows that they exchange, and on the
/// number of pieces.
#[test]
fn ranks_may_evaluate_batches_of_different_sizes() {
    let cases =
        models().into_iter().flat_map(|config| [0, 1].map(|num_shadowed| (config.clone(), num_shadowed)));
    for (mut config, num_shadowed) in cases {
        // All tokens choose the first experts, so the first rank receives most rows of the others.
        config.initializer_range = 0.0;
        config.experts.as_mut().unwrap().exchange = ExchangeConfig { num_chunks: 1, num_shadowed };
        // Evaluates batches with these numbers of samples on each rank. Returns, for each batch, the loss and the peak memory of
        // communication.
        let evaluate = |experts: usize, rounds: &[[usize; 2]]| {
            run_ranks(2, |group| {
                let rank = group.rank().0;
                let mut executor = executor_with_layout(&config, group, 1, 1, &Layout { experts, ..plain() });
                let evaluated = rounds.iter().map(|num_samples| {
                    let shape = (num_samples[rank], SHAPE.1);
                    let batch = random_batch(executor.device(), shape, 61, 1, rank);
                    let loss = executor.evaluate(Some(batch)).unwrap()[0].sum.to_bits();
                    (loss, executor.device().memory().usage(Category::Communication).peak)
                });
                evaluated.collect::<Vec<(u64, usize)>>()
            })
        };
        let (whole, uneven) = ([SHAPE.0; 2], [1, SHAPE.0]);
        let alone = evaluate(1, &[uneven]);
        for rounds in [&[uneven][..], &[whole, uneven]] {
            for (of_rank, alone) in evaluate(2, rounds).iter().zip(&alone) {
                assert_eq!(of_rank.last().unwrap().0, alone[0].0, "{:?}", config.family);
                assert!(
                    of_rank.iter().all(|(_, memory)| *memory == of_rank[0].1),
                    "smaller batches take memory"
                );
            }
        }
    }
}

/// Shadowed experts do not change the order of sums, even in a group that does not keep the order.
#[test]
fn shadows_keep_the_order_of_sums() {
    let mut config = models().swap_remove(0);
    let options = GroupOptions {
        keeps_order: false,
        algorithm: Some(Algorithm::Flat(FlatAlgorithm::Ring)),
        ..GroupOptions::default()
    };
    let options_of_run = ExecutorOptions { determinism: Determinism::Run, ..OPTIONS };
    let [without, with] = [0, 3].map(|num_shadowed| {
        config.experts.as_mut().unwrap().exchange.num_shadowed = num_shadowed;
        let layout = Layout { options: options_of_run, experts: 4, ..plain() };
        let groups = inproc_world_on(&[0, 1, 2, 3], &options);
        on_threads(groups, &|group| train(&config, group, 1, &layout)).swap_remove(0)
    });
    assert!(without == with);
}

#[test]
fn losses_are_close_if_sums_are_reordered() {
    for config in models() {
        let oracle = run(&config, 1, MICROBATCHES, &plain());
        let check = |num_ranks: usize, accumulation: usize, layout: Layout<'_>, what: &str| {
            check_near(&run(&config, num_ranks, accumulation, &layout), &oracle, what);
        };
        check(2, 2, Layout { experts: 2, ..plain() }, "two microbatches each");
        check(4, 2, Layout { experts: 2, tensor: 2, ..plain() }, "with a tensor axis");
        let pipeline = Some(Pipeline { kind: ScheduleKind::OneFOneB, num_ranks: 2, stages_per_rank: 1 });
        check(4, 2, Layout { experts: 2, pipeline, ..plain() }, "in a pipeline");
        let pipeline = Some(Pipeline { kind: ScheduleKind::ZeroBubbleH1, num_ranks: 2, stages_per_rank: 1 });
        check(
            8,
            2,
            Layout { experts: 2, tensor: 2, pipeline, ..plain() },
            "in a pipeline with a tensor axis",
        );
        let state = StateLayout::zero(2);
        check(4, 1, Layout { experts: 2, num_shards: 4, state, ..plain() }, "shards of experts");
    }
}

/// Ranks with other experts would wait for the rows of the rank without a batch.
#[test]
fn evaluation_without_a_batch_is_rejected_with_expert_parallelism() {
    let config = &models()[0];
    let refused = |experts: usize| {
        run_ranks(2, |group| {
            let mut executor = executor_with_layout(config, group, 1, 1, &Layout { experts, ..plain() });
            matches!(executor.evaluate(None), Err(ParallelError::NoBatch))
        })
    };
    assert_eq!(refused(2), [true, true]);
    assert_eq!(refused(1), [false, false]);
}
