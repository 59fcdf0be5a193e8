//! Models with tensor and context parallelism, compared with one rank.

use crate::common::{DEFAULT, Layout, OPTIONS, Pipeline, executor_of_model};
use std::sync::Arc;
use trireme_base::{AxisExchange, ExchangeKind, PassExchanges, UnitAxis};
use trireme_codec::{CodecName, Compression, CompressionOptions};
use trireme_comm::Group;
use trireme_model::{Batch, Model, ModelConfig, token_specs};
use trireme_optim::{MuonScale, OptimizerName, OptimizerSettings};
use trireme_parallel::{
    Determinism, Executor, ExecutorOptions, Generation, GradNorm, StepPlan, ZeroPlusPlus,
};
use trireme_schedule::pipeline::ScheduleKind;
use trireme_schedule::{Keep, StateClass, StateLayout, Tier};
use trireme_tensor::{
    AxisRank, BackendKind, DetachedOptions, Device, DeviceOptions, IntegerFormat, ParameterInfo, Parameters,
    Precision,
};
use trireme_testkit::{random_tokens, run_ranks, run_ranks_on};

const SHAPE: (usize, usize) = (2, 16);
const MICROBATCHES: usize = 4;

/// Maximum relative difference of losses in f32.
const LOSS_TOLERANCE: f64 = 1e-5;

/// Maximum relative difference of losses in bf16.
const BF16_LOSS_TOLERANCE: f64 = 1.0 / 256.0;

/// Maximum relative L2 difference of gradients in f32.
const GRADIENT_TOLERANCE: f64 = 1e-4;

fn models() -> Vec<ModelConfig> {
    let gpt2 = r#"{"model_type": "gpt2", "vocab_size": 61, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 4}"#;
    // With four ranks, each has one query head, and two ranks share a key and value head.
    let llama = r#"{"model_type": "llama", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
        "max_position_embeddings": 32, "attention_bias": true, "mlp_bias": true}"#;
    // Queries and keys are normalized per head.
    let qwen3 = r#"{"model_type": "qwen3", "vocab_size": 64, "hidden_size": 24, "intermediate_size": 40,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8,
        "max_position_embeddings": 32, "tie_word_embeddings": true}"#;
    // Additions to the residual stream are normalized, and logits are capped.
    let gemma2 = r#"{"model_type": "gemma2", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
        "max_position_embeddings": 32, "query_pre_attn_scalar": 6, "sliding_window": 8}"#;
    // Mixture of experts; each rank has a part of every expert.
    let mixtral = r#"{"model_type": "mixtral", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 20,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
        "max_position_embeddings": 32, "num_local_experts": 4, "router_z_loss_coef": 0.01, "router_aux_loss_coef": 0.02}"#;
    // Latent attention, shared experts, and biases that balance the routed experts.
    let deepseek = r#"{"model_type": "deepseek_v3", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 32,
        "q_lora_rank": 10, "kv_lora_rank": 12, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 5,
        "n_routed_experts": 6, "n_group": 3, "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 8,
        "first_k_dense_replace": 1}"#;
    [gpt2, llama, qwen3, gemma2, mixtral, deepseek].map(|text| ModelConfig::from_json(text).unwrap()).into()
}

/// The results of a training run.
#[derive(Debug)]
struct RunResult {
    losses: Vec<f64>,
    norms: Vec<f64>,
    /// Each parameter with its name.
    parameters: Vec<(String, Vec<f32>)>,
}

fn executor(config: &ModelConfig, group: Group, num_ranks: usize, layout: &Layout<'_>) -> Executor {
    let build = |device: &Device, table| config.build_into(table, SHAPE.1, device);
    let ranks_per_sample =
        layout.tensor * layout.context.0 * layout.pipeline.map_or(1, |pipeline| pipeline.num_ranks);
    let data_degree = num_ranks / ranks_per_sample;
    executor_of_model(&build, &token_specs(SHAPE.0, SHAPE.1), group, 1, MICROBATCHES / data_degree, layout)
}

fn train(config: &ModelConfig, num_ranks: usize, num_steps: u64, layout: &Layout<'_>) -> RunResult {
    train_on(&vec![0; num_ranks], config, num_steps, layout)
}

/// As [`train`], with ranks on these hosts.
fn train_on(hosts: &[usize], config: &ModelConfig, num_steps: u64, layout: &Layout<'_>) -> RunResult {
    let found = run_ranks_on(hosts, |group| {
        let mut executor = executor(config, group, hosts.len(), layout);
        let (mut losses, mut norms) = (Vec::new(), Vec::new());
        for step in 1..=num_steps {
            let plan = StepPlan { step, lr: 1e-3, grad_norm: GradNorm::Measure, has_loss: true };
            let outcome = executor.run(plan, &mut batches(&executor, config, step).into_iter()).unwrap();
            losses.push(outcome.loss);
            norms.extend(outcome.grad_norm);
        }
        executor.check_replicas().unwrap();
        let all = executor.gather_parameters().unwrap();
        let values = |all: Parameters| {
            let table = Arc::clone(all.table());
            let value = |info: &ParameterInfo| {
                (info.name.clone(), all.values(info.unit).unwrap()[info.range()].to_vec())
            };
            table.parameters().iter().map(value).collect()
        };
        RunResult { losses, norms, parameters: all.map_or_else(Vec::new, values) }
    });
    let same = |of: fn(&RunResult) -> &Vec<f64>| found.iter().all(|one| of(one) == of(&found[0]));
    assert!(same(|found| &found.losses) && same(|found| &found.norms), "all ranks come to the same");
    found.into_iter().next().unwrap()
}

fn batches(executor: &Executor, config: &ModelConfig, step: u64) -> Vec<Batch> {
    let num = executor.program().header.num_microbatches;
    let batch = |index| {
        let place = executor.global_microbatch(index);
        positions_of_batch(executor, config, step, place)
    };
    (0..num).map(batch).collect()
}

/// Returns this rank's positions of a random batch.
fn positions_of_batch(executor: &Executor, config: &ModelConfig, step: u64, place: usize) -> Batch {
    let batch = random_tokens(SHAPE, config.vocab_size, step, place);
    batch.upload_positions(executor.device(), executor.ranks().context_rank()).unwrap()
}

fn difference(found: &[f32], expected: &[f32]) -> f64 {
    let squares =
        |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
    let pairs = found.iter().zip(expected).map(|(found, expected)| f64::from(*found) - f64::from(*expected));
    squares(&mut { pairs }) / squares(&mut expected.iter().map(|&value| f64::from(value))).max(1e-12)
}

/// Returns layouts with a tensor or context axis, each with its number of ranks.
fn layouts(options: ExecutorOptions) -> Vec<(usize, Layout<'static>)> {
    let rows = ExecutorOptions { shards_rows: true, ..options };
    let layout = |tensor, options| Layout { tensor, options, ..Layout::default() };
    let pipeline = Some(Pipeline { kind: ScheduleKind::OneFOneB, num_ranks: 2, stages_per_rank: 1 });
    let halves = Some(Pipeline { kind: ScheduleKind::ZeroBubbleH1, num_ranks: 2, stages_per_rank: 1 });
    let zero = |stage| Layout { num_shards: 2, state: StateLayout::zero(stage), ..layout(2, rows) };
    let context = |degree, heads| Layout { context: (degree, heads), ..layout(1, rows) };
    vec![
        (2, layout(2, options)),
        (2, layout(2, rows)),
        (4, layout(4, options)),
        (4, layout(4, rows)),
        (4, layout(2, rows)),
        (4, zero(1)),
        (4, zero(2)),
        (4, zero(3)),
        (4, Layout { pipeline, ..layout(2, options) }),
        (8, Layout { pipeline: halves, ..zero(2) }),
        (2, context(2, 1)),
        (2, context(2, 2)),
        (4, context(4, 1)),
        (4, context(4, 2)),
        (4, context(2, 1)),
        (4, Layout { num_shards: 4, state: StateLayout::zero(1), ..context(2, 2) }),
        (4, Layout { num_shards: 2, state: StateLayout::zero(2), ..context(2, 1) }),
        (4, Layout { num_shards: 4, state: StateLayout::zero(3), ..context(4, 2) }),
        (4, Layout { tensor: 2, ..context(2, 1) }),
        (8, Layout { tensor: 2, num_shards: 4, state: StateLayout::zero(2), ..context(2, 1) }),
        (4, Layout { pipeline, ..context(2, 1) }),
    ]
}

fn describe(config: &ModelConfig, num_ranks: usize, layout: &Layout<'_>) -> String {
    let Layout { tensor, context, state, .. } = layout;
    let name = config.family.name();
    format!(
        "{name} on {num_ranks} ranks, {tensor} of the tensor axis and {context:?} of the context axis,{state}"
    )
}

#[test]
fn gradients_are_those_of_one_rank() {
    let sgd = (OptimizerName::Sgd, OptimizerSettings { momentum: 0.0, ..DEFAULT });
    let plain = |layout| Layout { optimizer: sgd, weight_decay: 0.0, ..layout };
    for config in models() {
        let before = train(&config, 1, 0, &Layout::default()).parameters;
        let gradients = |found: RunResult| -> Vec<Vec<f32>> {
            let pairs = found.parameters.iter().zip(&before);
            let change = |(after, before): (&f32, &f32)| after - before;
            pairs.map(|((_, after), (_, before))| after.iter().zip(before).map(change).collect()).collect()
        };
        let expected = gradients(train(&config, 1, 1, &plain(Layout::default())));
        for (num_ranks, layout) in layouts(OPTIONS) {
            let what = describe(&config, num_ranks, &layout);
            assert_eq!(train(&config, num_ranks, 0, &layout).parameters, before, "{what}: initial values");
            let found = gradients(train(&config, num_ranks, 1, &plain(layout)));
            for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
                let difference = difference(found, expected);
                assert!(
                    difference < GRADIENT_TOLERANCE,
                    "{what}: parameter {index} differs by {difference:e}"
                );
            }
        }
    }
}

#[test]
fn losses_of_twenty_steps_are_those_of_one_rank() {
    for config in models() {
        let expected = train(&config, 1, 20, &Layout::default());
        for (num_ranks, layout) in layouts(OPTIONS) {
            let found = train(&config, num_ranks, 20, &layout);
            for (found, expected) in [(&found.losses, &expected.losses), (&found.norms, &expected.norms)] {
                for (step, (found, expected)) in found.iter().zip(expected).enumerate() {
                    let is_close = (found / expected - 1.0).abs() < LOSS_TOLERANCE;
                    assert!(
                        is_close,
                        "{}, step {step}: {found} is not {expected}",
                        describe(&config, num_ranks, &layout)
                    );
                }
            }
        }
    }
}

#[test]
fn recomputation_and_offloading_change_no_bit() {
    let config = &models()[1];
    let rows = ExecutorOptions { shards_rows: true, ..OPTIONS };
    let layout = Layout { tensor: 2, options: rows, num_shards: 2, ..Layout::default() };
    let zero = |stage| Layout { state: StateLayout::zero(stage), ..layout.clone() };
    let expected = train(config, 4, 3, &zero(2));
    let folder = tempfile::tempdir().unwrap();
    let moved = zero(2).state.with_tier(StateClass::Optimizer, Tier::Disk);
    let host = zero(2).state.with_tier(StateClass::Activations, Tier::Host);
    let detached = BackendKind::Detached(DetachedOptions::default());
    for layout in [
        Layout { keeps: &[Keep::All, Keep::Products, Keep::Products, Keep::All], ..zero(2) },
        Layout { keeps: &[Keep::All, Keep::Input, Keep::Input, Keep::All], ..zero(2) },
        Layout { state: moved, folder: folder.path(), ..layout.clone() },
        Layout { state: host, ..layout.clone() },
        Layout { backend: detached, ..zero(2) },
        zero(3),
    ] {
        let found = train(config, 4, 3, &layout);
        assert!(
            found.losses == expected.losses && found.parameters == expected.parameters,
            "{}",
            layout.state
        );
    }
}

#[test]
fn optimizers_use_full_parameters() {
    let muon = OptimizerSettings { muon_scale: MuonScale::Original, ..DEFAULT };
    let kinds = [
        (OptimizerName::Lamb, DEFAULT),
        (OptimizerName::Lars, OptimizerSettings { trust_coefficient: 0.01, ..DEFAULT }),
        (OptimizerName::Adafactor, DEFAULT),
        (OptimizerName::Muon, muon),
    ];
    for config in &models()[..2] {
        for optimizer in kinds {
            let before = train(config, 1, 0, &Layout::default()).parameters;
            let expected = train(config, 1, 2, &Layout { optimizer, ..Layout::default() }).parameters;
            for (num_ranks, layout) in layouts(OPTIONS) {
                let layout = Layout { optimizer, ..layout };
                let found = train(config, num_ranks, 2, &layout).parameters;
                // Softmax does not depend on the biases of keys, so their gradients are only rounding errors. Optimizers that give all
                // elements updates of similar size magnify these errors.
                let is_noise = |name: &str| name.ends_with("c_attn.bias") || name.ends_with("k_proj.bias");
                for (index, (name, before)) in
                    before.iter().enumerate().filter(|(_, (name, _))| !is_noise(name))
                {
                    let moved = difference(before, &expected[index].1).max(1e-12);
                    let difference = difference(&found[index].1, &expected[index].1) / moved;
                    let is_close = difference < 10.0 * GRADIENT_TOLERANCE;
                    let what = describe(config, num_ranks, &layout);
                    assert!(is_close, "{optimizer:?}, {what}: {name} differs by {difference:e}");
                }
            }
        }
    }
}

/// The rounding by codecs and integer formats depends on the neighboring elements of the unit, which differ between ranks of the tensor
/// axis. The ranks that hold the same parameter must still have equal values, which [`train_on`] checks.
#[test]
fn block_rounded_parameters_are_equal_on_all_ranks() {
    let codec = |codec: CodecName| {
        let rank = (codec == CodecName::PowerSgd).then_some(2);
        let ratio = (codec == CodecName::TopK).then_some(0.1);
        let options = CompressionOptions { codec, rank, ratio, ..CompressionOptions::default() };
        let compression = Compression::new(&options).unwrap();
        ExecutorOptions { compression, determinism: Determinism::Run, ..OPTIONS }
    };
    let rows = |options| ExecutorOptions { shards_rows: true, ..options };
    let momentum = (OptimizerName::OneBitAdam, OptimizerSettings { freeze_step: 2, ..DEFAULT });
    let integers = ZeroPlusPlus {
        quantized_weights: true,
        secondary_shards: true,
        quantized_gradients: Some(IntegerFormat::Int8),
    };
    let integers = ExecutorOptions { zero_plus_plus: integers, determinism: Determinism::Run, ..OPTIONS };
    let layout = |options| Layout { tensor: 2, options, ..Layout::default() };
    let config = &models()[1];
    let expected = train(config, 1, 5, &Layout::default()).losses;
    for (hosts, layout) in [
        (&[0; 4][..], layout(codec(CodecName::Int8))),
        (&[0; 4], layout(rows(codec(CodecName::PowerSgd)))),
        (&[0; 4], layout(rows(codec(CodecName::TopK)))),
        // Two ranks share a key head.
        (&[0; 8], Layout { tensor: 4, ..layout(rows(codec(CodecName::Int4))) }),
        (&[0; 4], Layout { optimizer: momentum, ..layout(rows(codec(CodecName::OneBit))) }),
        (
            &[0, 0, 0, 0, 1, 1, 1, 1],
            Layout { num_shards: 4, state: StateLayout::zero(3), ..layout(rows(integers)) },
        ),
    ] {
        let found = train_on(hosts, config, 5, &layout).losses;
        for (found, expected) in found.iter().zip(&expected) {
            assert!((found / expected - 1.0).abs() < 0.02, "{:?}: {found} is not {expected}", layout.options);
        }
    }
}

/// In bf16, each partial sum is rounded to 8 bits before it is reduced; on one rank, it is not. Losses may therefore differ by a unit of
/// rounding, 2^-8.
#[test]
fn losses_in_16_bits_are_near_those_of_one_rank() {
    let options = ExecutorOptions { precision: Precision::Bf16, ..OPTIONS };
    for config in models() {
        let expected = train(&config, 1, 5, &Layout { options, ..Layout::default() }).losses;
        for (num_ranks, layout) in layouts(options) {
            let found = train(&config, num_ranks, 5, &layout).losses;
            for (found, expected) in found.iter().zip(&expected) {
                let difference = (found / expected - 1.0).abs();
                assert!(
                    difference < BF16_LOSS_TOLERANCE,
                    "{}: {difference:e}",
                    describe(&config, num_ranks, &layout)
                );
            }
        }
    }
}

#[test]
fn evaluation_and_generation_are_those_of_one_rank() {
    for config in models() {
        let run = |num_ranks, layout: &Layout<'_>| {
            let found = run_ranks(num_ranks, |group| {
                let mut executor = executor(&config, group, num_ranks, layout);
                let batch = positions_of_batch(&executor, &config, 9, 0);
                let mean = executor.evaluate(Some(batch)).unwrap()[0];
                let mut generation = Generation::new(&mut executor, 8);
                let mut logits = generation.append(&[1, 2, 3]).unwrap();
                logits.extend(generation.append(&[4]).unwrap());
                (mean, logits)
            });
            assert!(found.iter().all(|(_, logits)| *logits == found[0].1), "all ranks come to the same");
            // Each rank reports all rows or a part of them.
            let sum: f64 = found.iter().map(|(mean, _)| mean.sum).sum();
            let num_rows: usize = found.iter().map(|(mean, _)| mean.num_rows).sum();
            (sum / num_rows as f64, found.into_iter().next().unwrap().1)
        };
        let expected = run(1, &Layout::default());
        for (num_ranks, layout) in
            layouts(OPTIONS).into_iter().filter(|(_, layout)| layout.pipeline.is_none())
        {
            let found = run(num_ranks, &layout);
            assert!(
                (found.0 / expected.0 - 1.0).abs() < LOSS_TOLERANCE,
                "{}",
                describe(&config, num_ranks, &layout)
            );
            let difference = difference(&found.1, &expected.1);
            assert!(difference < LOSS_TOLERANCE, "{}: {difference:e}", describe(&config, num_ranks, &layout));
        }
    }
}

/// Shoeybi et al., "Megatron-LM", 2019, section 3: two all-reduces per block in each direction. Korthikanti et al. 2022, section 4.2.2: an
/// all-gather and a reduce-scatter in place of each, and another all-gather of the rows in backward.
#[test]
fn messages_are_those_of_the_papers() {
    use ExchangeKind::{AllGather as Gather, AllReduce as Reduce, ReduceScatter as Scatter};
    let rows = SHAPE.0 * SHAPE.1;
    for config in &models()[..2] {
        for (precision, shards_rows) in
            [(Precision::F32, false), (Precision::F32, true), (Precision::Bf16, true)]
        {
            let options = ExecutorOptions { precision, shards_rows, ..OPTIONS };
            let layout = Layout { tensor: 2, options, ..Layout::default() };
            let (wide, narrow) =
                (rows * config.hidden_size * 4, rows * config.hidden_size * precision.dtype().size());
            let statistics = 2 * rows * 3 * 4;
            let list = |exchanges: &[(ExchangeKind, usize)]| -> Vec<AxisExchange> {
                let exchange = |&(kind, num_bytes)| AxisExchange { axis: UnitAxis::Tensor, kind, num_bytes };
                exchanges.iter().map(exchange).collect()
            };
            let all =
                |kinds: &[ExchangeKind]| list(&kinds.iter().map(|&kind| (kind, narrow)).collect::<Vec<_>>());
            let block = if shards_rows {
                PassExchanges {
                    forward: all(&[Gather, Scatter, Gather, Scatter]),
                    // The gather of a column-parallel layer's input overlaps with the computation of its gradient.
                    backward: all(&[Gather, Gather, Scatter, Gather, Gather, Scatter]),
                    input_half: all(&[Gather, Scatter, Gather, Scatter]),
                    weight_half: all(&[Gather, Gather]),
                }
            } else {
                PassExchanges {
                    forward: all(&[Reduce, Reduce]),
                    backward: all(&[Reduce, Reduce]),
                    input_half: all(&[Reduce, Reduce]),
                    weight_half: Vec::new(),
                }
            };
            let (embedding, head) = if shards_rows {
                (
                    (vec![(Scatter, narrow)], vec![(Gather, wide)]),
                    vec![(Gather, narrow), (Gather, statistics), (Scatter, narrow)],
                )
            } else {
                ((vec![(Reduce, narrow)], vec![]), vec![(Gather, statistics), (Reduce, narrow)])
            };
            let found = run_ranks(4, |group| {
                let mut executor = executor(config, group, 4, &layout);
                let units: Vec<PassExchanges> =
                    executor.profile().units.iter().map(|unit| unit.exchanges.clone()).collect();
                let tensor = Arc::clone(executor.ranks().tensor());
                let before = tensor.statistics().payload_bytes;
                let plan = StepPlan { step: 1, lr: 1e-3, grad_norm: GradNorm::Off, has_loss: true };
                executor.run(plan, &mut batches(&executor, config, 1).into_iter()).unwrap();
                let table = executor.model().table();
                let terms = executor.profile().units.iter().flat_map(|unit| &unit.partial_grads);
                let terms: usize = terms.map(|&term| table.parameters()[term].shape.num_elements() * 4).sum();
                let num_microbatches = executor.program().header.num_microbatches;
                (units, terms, num_microbatches, (tensor.statistics().payload_bytes - before) as usize)
            });
            for (units, terms, num_microbatches, sent) in found {
                assert!(units[1..units.len() - 1].iter().all(|unit| *unit == block), "{units:?}");
                assert_eq!(
                    (&units[0].forward, &units[0].backward),
                    (&list(&embedding.0), &list(&embedding.1))
                );
                assert_eq!(
                    (&units[units.len() - 1].forward, &units[units.len() - 1].backward),
                    (&Vec::new(), &list(&head))
                );
                // With two ranks, each sends half of the bytes that are gathered or scattered, and all bytes that are all-reduced.
                let bytes = |exchange: &AxisExchange| match exchange.kind {
                    Reduce => exchange.num_bytes,
                    Gather | Scatter => exchange.num_bytes / 2,
                    other => panic!("{other:?} along the tensor axis"),
                };
                let passes = units.iter().flat_map(|unit| unit.forward.iter().chain(&unit.backward));
                assert_eq!(sent, passes.map(bytes).sum::<usize>() * num_microbatches + terms);
            }
        }
    }
}

/// Liu et al. 2023, section 3: keys and values go around the ring once in forward and once in backward; their gradients go around with
/// them, and back to their own rank. Jacobs et al. 2023, section 3.2: an all-to-all of queries, keys and values, and one of the output, in
/// each direction.
#[test]
fn keys_go_around_the_ring_and_heads_are_exchanged_as_in_the_papers() {
    use ExchangeKind::{AllToAll, Shift};
    for config in &models()[..2] {
        for (precision, degree, heads) in
            [(Precision::F32, 2, 1), (Precision::Bf16, 4, 1), (Precision::F32, 2, 2), (Precision::Bf16, 4, 2)]
        {
            let (options, ring) = (ExecutorOptions { precision, ..OPTIONS }, degree / heads);
            let layout = Layout { context: (degree, heads), options, ..Layout::default() };
            let (width, rows) = (precision.dtype().size(), SHAPE.0 * SHAPE.1 / degree);
            let queries = rows * config.num_heads * config.head_dim;
            let keys_values = rows * 2 * config.num_kv_heads * config.head_dim;
            let along = |axis, kind, num_bytes: usize| AxisExchange { axis, kind, num_bytes };
            let exchanged = |elements: usize| {
                (heads > 1).then(|| along(UnitAxis::Heads, AllToAll, elements * width)).into_iter()
            };
            let shift = |width: usize| along(UnitAxis::Ring, Shift, keys_values * width);
            let passing = || std::iter::repeat_n(shift(width), ring - 1);
            // In backward, gradients of keys and values follow, each after the keys and values themselves.
            let back = (0..ring).flat_map(|step| {
                let keys = (step + 1 < ring).then(|| shift(width));
                keys.into_iter().chain((ring > 1).then(|| shift(4)))
            });
            let forward: Vec<AxisExchange> =
                exchanged(queries + keys_values).chain(passing()).chain(exchanged(queries)).collect();
            let backward: Vec<AxisExchange> =
                exchanged(queries).chain(back).chain(exchanged(queries + keys_values)).collect();
            let found = run_ranks(degree, |group| {
                let mut executor = executor(config, group, degree, &layout);
                let units = executor.profile().units.iter().map(|unit| unit.exchanges.clone());
                let units: Vec<PassExchanges> = units.collect();
                let groups = [executor.ranks().ring(), executor.ranks().heads()].map(Arc::clone);
                let of_groups = || groups.each_ref().map(|group| group.statistics());
                let sent = || of_groups().map(|of_group| of_group.message_bytes + of_group.payload_bytes);
                let before = sent();
                let plan = StepPlan { step: 1, lr: 1e-3, grad_norm: GradNorm::Off, has_loss: true };
                // If only the ring has several ranks, its group is also the data-parallel group, which counts the bytes of gradients as
                // well. The bytes are checked only if both groups have several ranks.
                let is_both = ring > 1 && heads > 1;
                executor.run(plan, &mut batches(&executor, config, 1).into_iter()).unwrap();
                let num_microbatches = executor.program().header.num_microbatches;
                let sent: Vec<u64> =
                    sent().iter().zip(before).map(|(after, before)| after - before).collect();
                (units, num_microbatches, is_both.then_some(sent))
            });
            for (units, num_microbatches, sent) in found {
                for unit in &units[1..units.len() - 1] {
                    assert_eq!((&unit.forward, &unit.backward), (&forward, &backward));
                    assert_eq!((&unit.input_half, &unit.weight_half), (&backward, &Vec::new()));
                }
                let of_axis = |wanted| -> usize {
                    let all = forward.iter().chain(&backward).filter(|exchange| exchange.axis == wanted);
                    all.map(|exchange| exchange.num_bytes).sum::<usize>()
                        * num_microbatches
                        * (units.len() - 2)
                };
                if let Some(sent) = sent {
                    let expected = [of_axis(UnitAxis::Ring), of_axis(UnitAxis::Heads) * (heads - 1) / heads];
                    assert_eq!(sent, expected.map(|bytes| bytes as u64));
                }
            }
        }
    }
}

#[test]
fn indivisible_degrees_are_rejected_with_the_nearest_valid_ones() {
    let device = Device::counting(DeviceOptions::default()).unwrap();
    let refused = |config: &ModelConfig, degree| {
        let build = |device: &Device, table| config.build_into(table, SHAPE.1, device);
        Model::build_at(AxisRank::new(0, degree), &device, build).unwrap_err().to_string()
    };
    assert_eq!(
        refused(&models()[0], 3),
        "3 ranks cannot split dim 1 of 'transformer.h.0.attn.c_attn.weight' into equal parts: it has 4 pieces of 8 elements that \
         stay together in each of 3 groups; nearest possible degree: 2 or 4"
    );
    let llama = refused(&models()[1], 8);
    assert!(
        llama.contains("'model.layers.0.self_attn.q_proj.weight'")
            && llama.ends_with("; nearest possible degree: 4"),
        "{llama}"
    );
}
