//! qwen3_moe (Qwen team, "Qwen3 technical report", 2025): qwen3 with a mixture of experts in most layers.

use super::decoder::{Defaults, build, read_decoder, read_window, window_size, write_decoder};
use super::qwen3::STYLE;
use crate::config::{AttentionConfig, ExpertsConfig, Family, ModelConfig, Reader, SlidingWindow, shortest};
use crate::error::Result;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    name: "qwen3_moe",
    supported_values: &[("hidden_act", &[r#""silu""#]), ("partial_rotary_factor", &["1"])],
    read,
    write,
    build: |config, rotary, table| build(config, rotary, table, STYLE),
};

fn read(reader: &Reader<'_>) -> Result<ModelConfig> {
    let bias = reader.flag("attention_bias", false)?;
    let config = read_decoder(reader, FAMILY, Defaults { num_kv_heads: Some(4), ..Defaults::default() })?;
    // As in transformers, the window applies to all layers. In qwen3, it applies only to the last layers.
    let window = if reader.flag("use_sliding_window", false)? { read_window(reader)? } else { None };
    let layers = (0..config.num_layers).collect();
    let sliding = window.map(|size| SlidingWindow { size, layers });
    let attention = AttentionConfig { sliding, ..AttentionConfig::default() };
    let step = reader.size_or("decoder_sparse_step", 1)?;
    let dense = reader.indices("mlp_only_layers", config.num_layers)?;
    let has_experts = |layer: &usize| !dense.contains(layer) && (layer + 1).is_multiple_of(step);
    let num_experts = reader.optional_size("num_experts")?.or(reader.optional_size("num_local_experts")?);
    let experts = ExpertsConfig {
        layers: (0..config.num_layers).filter(has_experts).collect(),
        num_experts: num_experts.unwrap_or(128),
        num_choices: reader.size_or("num_experts_per_tok", 8)?,
        intermediate_size: reader.size_or("moe_intermediate_size", 768)?,
        normalizes: reader.flag("norm_topk_prob", false)?,
        scale: 1.0,
        balance_loss: reader.weight("router_aux_loss_coef", 1e-3)?,
        z_loss: reader.weight("router_z_loss_coef", 0.0)?,
        ..ExpertsConfig::default()
    };
    experts.check("num_experts")?;
    let experts = Some(experts);
    Ok(ModelConfig { qkv_bias: bias, attention_output_bias: bias, attention, experts, ..config })
}

fn write(config: &ModelConfig) -> Value {
    let experts = config.experts.as_ref().expect("a qwen3_moe has experts");
    let dense: Vec<usize> =
        (0..config.num_layers).filter(|&layer| config.experts_of(layer).is_none()).collect();
    let own = json!({
        "hidden_act": "silu",
        "attention_bias": config.qkv_bias,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_choices,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.normalizes,
        "decoder_sparse_step": 1,
        "mlp_only_layers": dense,
        "router_aux_loss_coef": shortest(experts.balance_loss),
        "router_z_loss_coef": shortest(experts.z_loss),
        "use_sliding_window": window_size(config).is_some(),
        "sliding_window": window_size(config),
    });
    write_decoder(config, "Qwen3MoeForCausalLM", own)
}
