//! llama (Touvron et al., "LLaMA: open and efficient foundation language models", 2023), with the scaled rotary positions of llama 3.

use super::decoder::{Defaults, Style, build, read_decoder, write_decoder};
use crate::config::{Family, ModelConfig, Reader, Rope};
use crate::error::Result;
use serde_json::{Value, json};
use trireme_tensor::Activation;

pub(super) const FAMILY: Family = Family {
    name: "llama",
    supported_values: &[("hidden_act", &[r#""silu""#]), ("partial_rotary_factor", &["1"])],
    read,
    write,
    build: |config, rotary, table| build(config, rotary, table, Style::LLAMA),
};

impl ModelConfig {
    /// Returns the config of a llama with rotary positions of base `rope_theta`. The caller must set its sizes, which are 0.
    pub fn llama(rope_theta: f64) -> Self {
        let rope = Some(Rope { theta: rope_theta, scaling: None });
        ModelConfig { rope, activation: Activation::Silu, ..ModelConfig::plain(FAMILY) }
    }
}

fn read(reader: &Reader<'_>) -> Result<ModelConfig> {
    let bias = reader.flag("attention_bias", false)?;
    Ok(ModelConfig {
        qkv_bias: bias,
        attention_output_bias: bias,
        mlp_bias: reader.flag("mlp_bias", false)?,
        ..read_decoder(reader, FAMILY, Defaults::default())?
    })
}

fn write(config: &ModelConfig) -> Value {
    let own = json!({
        "hidden_act": "silu",
        "attention_bias": config.qkv_bias,
        "mlp_bias": config.mlp_bias,
    });
    write_decoder(config, "LlamaForCausalLM", own)
}
