//! mixtral (Jiang et al., "Mixtral of experts", 2024): mistral with a mixture of experts in every layer.

use super::decoder::{Defaults, ExpertNames, Style, build, read_decoder, window_size, write_decoder};
use crate::config::{AttentionConfig, ExpertsConfig, Family, ModelConfig, Reader, SlidingWindow, shortest};
use crate::error::Result;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    name: "mixtral",
    supported_values: &[
        ("hidden_act", &[r#""silu""#]),
        ("partial_rotary_factor", &["1"]),
        ("router_jitter_noise", &["0"]),
    ],
    read,
    write,
    build: |config, rotary, table| build(config, rotary, table, STYLE),
};

const STYLE: Style = Style {
    expert_names: ExpertNames { module: "block_sparse_moe", projections: ["w1", "w3", "w2"] },
    ..Style::LLAMA
};

fn read(reader: &Reader<'_>) -> Result<ModelConfig> {
    let defaults =
        Defaults { num_kv_heads: Some(8), theta: Some(1e6), norm_epsilon: Some(1e-5), ..Defaults::default() };
    let config = read_decoder(reader, FAMILY, defaults)?;
    let layers: Vec<usize> = (0..config.num_layers).collect();
    let sliding = reader.optional_size("sliding_window")?;
    let sliding = sliding.map(|size| SlidingWindow { size, layers: layers.clone() });
    let experts = ExpertsConfig {
        layers,
        num_experts: reader.size_or("num_local_experts", 8)?,
        num_choices: reader.size_or("num_experts_per_tok", 2)?,
        intermediate_size: config.intermediate_size,
        normalizes: true,
        scale: 1.0,
        balance_loss: reader.weight("router_aux_loss_coef", 1e-3)?,
        z_loss: reader.weight("router_z_loss_coef", 0.0)?,
        ..ExpertsConfig::default()
    };
    experts.check("num_local_experts")?;
    let attention = AttentionConfig { sliding, ..AttentionConfig::default() };
    Ok(ModelConfig { attention, experts: Some(experts), ..config })
}

fn write(config: &ModelConfig) -> Value {
    let experts = config.experts.as_ref().expect("a mixtral has experts");
    let own = json!({
        "hidden_act": "silu",
        "sliding_window": window_size(config),
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_choices,
        "router_aux_loss_coef": shortest(experts.balance_loss),
        "router_z_loss_coef": shortest(experts.z_loss),
    });
    write_decoder(config, "MixtralForCausalLM", own)
}
