//! Experts on different ranks: the bits of one rank, but where sums split.

mod common;

use common::{ADAMW, Layout, OPTIONS, Pipeline, batches, laid_out};
use std::sync::Arc;
use trireme_comm::Group;
use trireme_model::ModelConfig;
use trireme_optim::OptimizerKind;
use trireme_parallel::{ExecutorOptions, GradNorm, StepPlan};
use trireme_schedule::pipeline::Kind;
use trireme_schedule::{Keep, StateLayout};
use trireme_tensor::{Backend, DetachedOptions, Precision};
use trireme_testkit::run_ranks;

/// Relative difference of losses where ranks take sums in another order.
const LOSS_TOLERANCE: f64 = 1e-5;

const MICROBATCHES: usize = 4;

fn models() -> Vec<ModelConfig> {
    let mixtral = r#"{"model_type": "mixtral", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 20,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
        "max_position_embeddings": 32, "num_local_experts": 4, "router_z_loss_coef": 0.01, "router_aux_loss_coef": 0.02}"#;
    let deepseek = r#"{"model_type": "deepseek_v3", "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 32,
        "q_lora_rank": 10, "kv_lora_rank": 12, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 5,
        "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 8,
        "first_k_dense_replace": 1}"#;
    [mixtral, deepseek].map(|text| ModelConfig::from_json(text).unwrap()).into()
}

/// Losses and norms of steps, as bits, and all parameters at the end.
type Found = (Vec<[u64; 2]>, Vec<(String, Vec<u32>)>);

fn train(config: &ModelConfig, group: Group, accumulation: usize, layout: &Layout<'_>) -> Found {
    let mut executor = laid_out(config, group, 1, accumulation, layout);
    let mut steps = Vec::new();
    for step in 1..=3 {
        let batches = batches(&executor, MICROBATCHES, step);
        let plan = StepPlan { step, lr: 1e-2, grad_norm: GradNorm::Measure };
        let outcome = executor.run(plan, &mut batches.into_iter()).unwrap();
        steps.push([outcome.loss.to_bits(), outcome.grad_norm.unwrap_or_default().to_bits()]);
    }
    executor.check_replicas().unwrap();
    let all = executor.gather_parameters().unwrap();
    let parameters = all.map_or_else(Vec::new, |all| {
        let table = Arc::clone(all.table());
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect();
        let of = |info: &trireme_tensor::ParameterInfo| {
            (info.name.clone(), bits(&all.values(info.unit)[info.range()]))
        };
        let mut found: Vec<(String, Vec<u32>)> = table.parameters().iter().map(of).collect();
        found.sort();
        found
    });
    (steps, parameters)
}

fn run(config: &ModelConfig, num_ranks: usize, accumulation: usize, layout: &Layout<'_>) -> Found {
    let found = run_ranks(num_ranks, |group| train(config, group, accumulation, layout));
    assert!(found.iter().all(|(steps, _)| *steps == found[0].0), "all ranks come to the same");
    found.into_iter().next().unwrap()
}

fn check_near(found: &Found, oracle: &Found, what: &str) {
    for ([found, _], [expected, _]) in found.0.iter().zip(&oracle.0) {
        let (found, expected) = (f64::from_bits(*found), f64::from_bits(*expected));
        assert!((found / expected - 1.0).abs() < LOSS_TOLERANCE, "{what}: {found} instead of {expected}");
    }
}

fn plain() -> Layout<'static> {
    Layout { optimizer: OptimizerKind::AdamW(ADAMW), ..Layout::default() }
}

#[test]
fn tokens_that_move_change_no_bit() {
    let bf16 = ExecutorOptions { precision: Precision::Bf16, ..OPTIONS };
    for config in models() {
        for options in [OPTIONS, bf16] {
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
            let backend = Backend::Detached(DetachedOptions { seed: 3, ignored_wait: None });
            check(2, 2, Layout { backend, ..sharded(2, 2, 2) }, "detached");
        }
    }
}

#[test]
fn sums_that_split_come_near() {
    for config in models() {
        let oracle = run(&config, 1, MICROBATCHES, &plain());
        let check = |num_ranks: usize, accumulation: usize, layout: Layout<'_>, what: &str| {
            check_near(&run(&config, num_ranks, accumulation, &layout), &oracle, what);
        };
        check(2, 2, Layout { experts: 2, ..plain() }, "two microbatches each");
        check(4, 2, Layout { experts: 2, tensor: 2, ..plain() }, "with a tensor axis");
        let pipeline = Some(Pipeline { kind: Kind::OneFOneB, num_ranks: 2, stages_per_rank: 1 });
        check(4, 2, Layout { experts: 2, pipeline, ..plain() }, "in a pipeline");
        let pipeline = Some(Pipeline { kind: Kind::ZeroBubbleH1, num_ranks: 2, stages_per_rank: 1 });
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
