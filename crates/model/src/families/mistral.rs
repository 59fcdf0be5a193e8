//! mistral (Jiang et al., "Mistral 7B", 2023): llama with optional sliding-window attention.

use super::decoder::{Defaults, Style, build, read_decoder, read_window, window_size, write_decoder};
use crate::config::{AttentionConfig, Family, ModelConfig, Reader, SlidingWindow};
use crate::error::Result;
use serde_json::{Value, json};

pub(super) const FAMILY: Family = Family {
    name: "mistral",
    supported_values: &[("hidden_act", &[r#""silu""#]), ("partial_rotary_factor", &["1"])],
    read,
    write,
    build: |config, rotary, table| build(config, rotary, table, Style::LLAMA),
};

fn read(reader: &Reader<'_>) -> Result<ModelConfig> {
    let config = read_decoder(reader, FAMILY, Defaults { num_kv_heads: Some(8), ..Defaults::default() })?;
    let layers = (0..config.num_layers).collect();
    let sliding = read_window(reader)?.map(|size| SlidingWindow { size, layers });
    Ok(ModelConfig { attention: AttentionConfig { sliding, ..AttentionConfig::default() }, ..config })
}

fn write(config: &ModelConfig) -> Value {
    let own = json!({ "hidden_act": "silu", "sliding_window": window_size(config) });
    write_decoder(config, "MistralForCausalLM", own)
}
