//! Families of models under different layouts: the bits equal the bits of one rank.

use crate::common::{ADAMW, Layout, OPTIONS, Pipeline, executor_with_layout, train};
use trireme_model::ModelConfig;
use trireme_parallel::ExecutorOptions;
use trireme_schedule::pipeline::ScheduleKind;
use trireme_schedule::{Keep, StateLayout};
use trireme_tensor::Precision;
use trireme_testkit::run_ranks;

const SIZES: &str = r#""vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 32, "sliding_window": 5"#;

const DEEPSEEK: &str = r#""model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 10, "kv_lora_rank": 12, "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2, "v_head_dim": 5, "n_routed_experts": 6, "n_group": 3, "topk_group": 2, "num_experts_per_tok": 3,
    "moe_intermediate_size": 7, "first_k_dense_replace": 1"#;

fn families() -> Vec<ModelConfig> {
    let own = [
        r#""model_type": "gpt2", "n_positions": 32, "n_embd": 24, "n_layer": 3, "n_head": 4"#,
        r#""model_type": "llama""#,
        r#""model_type": "mistral""#,
        r#""model_type": "qwen2""#,
        r#""model_type": "qwen3", "use_sliding_window": true, "max_window_layers": 1"#,
        r#""model_type": "gemma2", "query_pre_attn_scalar": 24"#,
        r#""model_type": "mixtral", "num_local_experts": 4, "router_z_loss_coef": 0.01"#,
        r#""model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 10, "mlp_only_layers": [1]"#,
        DEEPSEEK,
    ];
    let config = |own: &str| {
        // Keys of the family come last, and override common ones.
        ModelConfig::from_json(&format!("{{{SIZES}, {own}}}")).unwrap()
    };
    own.map(config).into()
}

#[test]
fn every_family_gives_the_bits_of_one_rank() {
    let bf16 = ExecutorOptions { precision: Precision::Bf16, ..OPTIONS };
    let pipeline = Pipeline { kind: ScheduleKind::OneFOneB, num_ranks: 2, stages_per_rank: 1 };
    for config in families() {
        for options in [OPTIONS, bf16] {
            let run = |layout: &Layout<'_>, world_size: usize, accumulation: usize| {
                let rank = |group| train(executor_with_layout(&config, group, 1, accumulation, layout), 4);
                let found = run_ranks(world_size, rank);
                assert!(found.iter().all(|(steps, _)| *steps == found[0].0), "ranks agree");
                (found[0].0.clone(), found.into_iter().flat_map(|(_, weights)| weights).collect::<Vec<u32>>())
            };
            let plain = Layout { options, optimizer: ADAMW, ..Layout::default() };
            let oracle = run(&plain, 1, 4);
            let num_experts = config.experts.as_ref().map_or(0, |experts| experts.layers.len());
            let keeps = [Keep::Input, Keep::Products].into_iter().cycle().take(3 + num_experts);
            let keeps: Vec<Keep> = [Keep::All].into_iter().chain(keeps).chain([Keep::All]).collect();
            let recomputed = Layout { keeps: &keeps, ..plain };
            assert!(run(&recomputed, 1, 4) == oracle, "{:?} recomputed", config.family);
            let sharded = Layout { options, state: StateLayout::zero(3), num_shards: 2, ..Layout::default() };
            let (steps, _) = run(&sharded, 2, 2);
            assert!(steps == oracle.0, "{:?} with ZeRO-3", config.family);
            let stages = Layout { options, pipeline: Some(pipeline), ..Layout::default() };
            let (steps, weights) = run(&stages, 2, 4);
            assert!(steps == oracle.0, "{:?} in a pipeline", config.family);
            assert!(weights == oracle.1, "{:?} in a pipeline has other weights", config.family);
        }
    }
}
