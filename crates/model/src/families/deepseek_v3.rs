//! deepseek_v3 (DeepSeek-AI, "DeepSeek-V3 technical report", 2024): latent attention; shared and routed experts. Routing uses sigmoid
//! scores, a limited number of expert groups, and a bias that balances loads.

use super::decoder::{Defaults, Style, build, read_decoder, write_decoder};
use crate::config::{
    AttentionConfig, ExpertsConfig, Family, LatentConfig, ModelConfig, Reader, RopeScaling, RouterScores,
    shortest, wrong,
};
use crate::error::Result;
use serde_json::{Value, json};
use trireme_tensor::ExpertGroups;

pub(super) const FAMILY: Family = Family {
    name: "deepseek_v3",
    supported_values: &[
        ("hidden_act", &[r#""silu""#]),
        ("partial_rotary_factor", &["1"]),
        ("scoring_func", &[r#""sigmoid""#]),
        ("topk_method", &[r#""noaux_tc""#]),
        ("moe_layer_freq", &["1"]),
    ],
    read,
    write,
    build: |config, rotary, table| build(config, rotary, table, Style::LLAMA),
};

fn read(reader: &Reader<'_>) -> Result<ModelConfig> {
    let bias = reader.flag("attention_bias", false)?;
    let config = read_decoder(reader, FAMILY, Defaults::default())?;
    if config.num_kv_heads != config.num_heads {
        let expected = format!("as many as the {} heads", config.num_heads);
        return Err(wrong("num_key_value_heads", &json!(config.num_kv_heads), &expected));
    }
    let latent = LatentConfig {
        query_rank: if reader.has("q_lora_rank") { reader.optional_size("q_lora_rank")? } else { Some(1536) },
        kv_rank: reader.size_or("kv_lora_rank", 512)?,
        nope_dim: reader.size_or("qk_nope_head_dim", 128)?,
        rotary_dim: reader.size_or("qk_rope_head_dim", 64)?,
        value_dim: reader.size_or("v_head_dim", 128)?,
        is_interleaved: reader.flag("rope_interleave", true)?,
    };
    let num_groups = reader.size_or("n_group", 8)?;
    let groups = ExpertGroups { num_groups, num_chosen: reader.size_or("topk_group", 4.min(num_groups))? };
    let num_dense = reader.non_negative("first_k_dense_replace", 3)?.min(config.num_layers);
    let experts = ExpertsConfig {
        layers: (num_dense..config.num_layers).collect(),
        num_experts: reader.size_or("n_routed_experts", 256)?,
        num_choices: reader.size_or("num_experts_per_tok", 8)?,
        intermediate_size: reader.size_or("moe_intermediate_size", 2048)?,
        num_shared: reader.non_negative("n_shared_experts", 1)?,
        scores: RouterScores::Sigmoid,
        normalizes: reader.flag("norm_topk_prob", true)?,
        scale: reader.number_f32("routed_scaling_factor", 2.5)?,
        groups: (groups.num_chosen < num_groups).then_some(groups),
        has_bias: true,
        balance_loss: reader.weight("aux_loss_alpha", 0.0)?,
        z_loss: reader.weight("router_z_loss_coef", 0.0)?,
        ..ExpertsConfig::default()
    };
    experts.check("n_routed_experts")?;
    let head_dim = latent.nope_dim + latent.rotary_dim;
    let factor = match config.rope.and_then(|rope| rope.scaling) {
        Some(RopeScaling::Yarn(scaling)) => scaling.latent_score_factor(),
        _ => 1.0,
    };
    let scale = (head_dim as f64).powf(-0.5) * factor;
    Ok(ModelConfig {
        head_dim,
        latent: Some(latent),
        experts: Some(experts),
        qkv_bias: bias,
        attention_output_bias: bias,
        attention: AttentionConfig { scale: Some(scale as f32), ..AttentionConfig::default() },
        ..config
    })
}

fn write(config: &ModelConfig) -> Value {
    let experts = config.experts.as_ref().expect("a deepseek_v3 has experts");
    let latent = config.latent.expect("a deepseek_v3 has latent attention");
    let groups = experts.groups.unwrap_or(ExpertGroups { num_groups: 1, num_chosen: 1 });
    let own = json!({
        "hidden_act": "silu",
        "attention_bias": config.qkv_bias,
        "head_dim": latent.rotary_dim,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.nope_dim,
        "qk_rope_head_dim": latent.rotary_dim,
        "v_head_dim": latent.value_dim,
        "rope_interleave": latent.is_interleaved,
        "first_k_dense_replace": config.num_layers - experts.layers.len(),
        "moe_layer_freq": 1,
        "n_routed_experts": experts.num_experts,
        "n_shared_experts": experts.num_shared,
        "num_experts_per_tok": experts.num_choices,
        "moe_intermediate_size": experts.intermediate_size,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": groups.num_groups,
        "topk_group": groups.num_chosen,
        "norm_topk_prob": experts.normalizes,
        "routed_scaling_factor": shortest(experts.scale),
        "aux_loss_alpha": shortest(experts.balance_loss),
        "router_z_loss_coef": shortest(experts.z_loss),
        "num_nextn_predict_layers": 0,
    });
    write_decoder(config, "DeepseekV3ForCausalLM", own)
}
