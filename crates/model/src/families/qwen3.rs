//! qwen3 (Qwen team, "Qwen3 technical report", 2025): qwen2 without biases, with normalized heads of queries and keys.

use super::decoder::{
    Defaults, Style, build, read_decoder, read_qwen_attention, write_decoder, write_qwen_attention,
};
use crate::config::{Family, ModelConfig, Reader};
use crate::error::Result;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    name: "qwen3",
    supported_values: &[("hidden_act", &[r#""silu""#]), ("partial_rotary_factor", &["1"])],
    read,
    write,
    build: |config, rotary, table| build(config, rotary, table, STYLE),
};

pub(super) const STYLE: Style = Style { has_qk_norms: true, ..Style::LLAMA };

fn read(reader: &Reader<'_>) -> Result<ModelConfig> {
    let bias = reader.flag("attention_bias", false)?;
    let config = read_decoder(
        reader,
        FAMILY,
        Defaults { head_dim: Some(128), num_kv_heads: Some(32), ..Defaults::default() },
    )?;
    let attention = read_qwen_attention(reader, config.num_layers)?;
    Ok(ModelConfig { qkv_bias: bias, attention_output_bias: bias, attention, ..config })
}

fn write(config: &ModelConfig) -> Value {
    let own = json!({ "hidden_act": "silu", "attention_bias": config.qkv_bias });
    write_decoder(config, "Qwen3ForCausalLM", write_qwen_attention(config, own))
}
