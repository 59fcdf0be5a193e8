//! gemma2 (Gemma team, "Gemma 2: improving open language models at a practical size", 2024): norms before and after attention and
//! feed-forward, with weights stored as offsets from 1; scaled embeddings; soft caps; sliding-window attention in every other layer.

use super::decoder::{
    Defaults, Style, build, layer_types, read_decoder, read_layer_types, read_window, window_size,
    write_decoder,
};
use crate::config::{AttentionConfig, Family, ModelConfig, Reader, SlidingWindow};
use crate::error::Result;
use serde_json::{Value, json};
use trireme_tensor::Activation;

pub(super) const FAMILY: Family = Family {
    name: "gemma2",
    supported_values: &[
        ("hidden_activation", &[r#""gelu_pytorch_tanh""#]),
        ("attention_bias", &["false"]),
        ("use_bidirectional_attention", &["false"]),
        ("partial_rotary_factor", &["1"]),
    ],
    read,
    write,
    build: |config, rotary, table| build(config, rotary, table, STYLE),
};

const STYLE: Style =
    Style { has_output_norms: true, norm_weight_offset: 1.0, scales_embedding: true, ..Style::LLAMA };

fn read(reader: &Reader<'_>) -> Result<ModelConfig> {
    let defaults = Defaults {
        head_dim: Some(256),
        num_kv_heads: Some(4),
        tie_word_embeddings: true,
        ..Defaults::default()
    };
    let config = read_decoder(reader, FAMILY, defaults)?;
    // Null disables a cap.
    let cap = |key: &'static str, default: f64| {
        if reader.has(key) {
            reader.get(key).map(|_| reader.number_f32(key, default)).transpose()
        } else {
            Ok(Some(default as f32))
        }
    };
    let alternating = || (0..config.num_layers).step_by(2).collect();
    let sliding = match read_window(reader)? {
        Some(size) => {
            let layers = read_layer_types(reader, config.num_layers)?.unwrap_or_else(alternating);
            Some(SlidingWindow { size, layers })
        }
        None => None,
    };
    let scalar = f64::from(reader.number_f32("query_pre_attn_scalar", 256.0)?);
    Ok(ModelConfig {
        activation: Activation::Gelu,
        attention: AttentionConfig {
            scale: Some(scalar.powf(-0.5) as f32),
            scales_by_layer: false,
            soft_cap: cap("attn_logit_softcapping", 50.0)?,
            sliding,
        },
        logit_soft_cap: cap("final_logit_softcapping", 30.0)?,
        ..config
    })
}

fn write(config: &ModelConfig) -> Value {
    let scale = f64::from(config.attention_rule(0).scale);
    // The value of `query_pre_attn_scalar` before its square root was taken. It is an integer in every published model.
    let scalar = 1.0 / (scale * scale);
    let nearest = scalar.round();
    let scalar = if nearest.powf(-0.5) as f32 == scale as f32 { nearest } else { scalar };
    let own = json!({
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": false,
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": config.attention.soft_cap.map(crate::config::shortest),
        "final_logit_softcapping": config.logit_soft_cap.map(crate::config::shortest),
        "sliding_window": window_size(config),
        "layer_types": layer_types(config),
    });
    write_decoder(config, "Gemma2ForCausalLM", own)
}
