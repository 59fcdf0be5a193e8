//! qwen2 (Qwen team, "Qwen2 technical report", 2024): llama with biases of queries, keys and values.

use super::decoder::{
    Defaults, Style, build, read_decoder, read_qwen_attention, write_decoder, write_qwen_attention,
};
use crate::config::{Family, ModelConfig, Reader};
use crate::error::Result;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    name: "qwen2",
    supported_values: &[
        ("hidden_act", &[r#""silu""#]),
        ("partial_rotary_factor", &["1"]),
        ("use_mrope", &["false"]),
    ],
    read,
    write,
    build: |config, rotary, table| build(config, rotary, table, Style::LLAMA),
};

fn read(reader: &Reader<'_>) -> Result<ModelConfig> {
    let config = read_decoder(reader, FAMILY, Defaults { num_kv_heads: Some(32), ..Defaults::default() })?;
    let attention = read_qwen_attention(reader, config.num_layers)?;
    Ok(ModelConfig { qkv_bias: true, attention, ..config })
}

fn write(config: &ModelConfig) -> Value {
    write_decoder(config, "Qwen2ForCausalLM", write_qwen_attention(config, json!({ "hidden_act": "silu" })))
}
