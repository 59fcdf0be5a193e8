//! mistral (Jiang et al., "Mistral 7B", 2023): llama, in which attention may slide.

use super::Architecture;
use super::decoder::{Defaults, Style, build, read_decoder, read_window, write_decoder};
use crate::config::{ModelConfig, Reader};
use crate::error::ModelError;
use serde_json::{Value, json};

pub(super) const FAMILY: Architecture = Architecture {
    name: "mistral",
    read,
    write,
    build: |config, rotary| build(config, rotary, Style::LLAMA),
};

fn read(reader: &Reader<'_>) -> Result<ModelConfig, ModelError> {
    reader.require("hidden_act", &[json!("silu")])?;
    let config = read_decoder(reader, FAMILY, Defaults { num_kv_heads: Some(8), ..Defaults::default() })?;
    let sliding_window = read_window(reader)?;
    let num_sliding = if sliding_window.is_some() { config.num_layers } else { 0 };
    Ok(ModelConfig { sliding_window, sliding_layers: (0..num_sliding).collect(), ..config })
}

fn write(config: &ModelConfig) -> Value {
    let own = json!({ "hidden_act": "silu", "sliding_window": config.sliding_window });
    write_decoder(config, "MistralForCausalLM", own)
}
