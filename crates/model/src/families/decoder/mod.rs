//! Common parts of the families that descend from llama: rotary positions, RMS normalization, gated feed-forward layers, and the names and
//! layouts of their Hugging Face checkpoints.

mod builder;

pub(super) use builder::build;

use crate::config::{
    AttentionConfig, Family, ModelConfig, Reader, SlidingWindow, read_rope, shortest, wrong,
};
use crate::error::Result;
use serde_json::{Value, json};
use trireme_tensor::Activation;

/// Differences between families that configs do not express.
#[derive(Debug, Clone, Copy)]
pub(super) struct Style {
    /// Whether heads of queries and keys are normalized.
    pub(super) has_qk_norms: bool,
    /// Whether the outputs of attention and feed-forward are also normalized before they are added to the residual stream.
    pub(super) has_output_norms: bool,
    /// Constant added to the stored weights of norms. Stored weights start at 1 minus this constant.
    pub(super) norm_weight_offset: f32,
    /// Whether embeddings are multiplied by the square root of their width.
    pub(super) scales_embedding: bool,
    pub(super) expert_names: ExpertNames,
}

/// Names of a layer's experts in checkpoints.
#[derive(Debug, Clone, Copy)]
pub(super) struct ExpertNames {
    /// Name of the module that contains the experts.
    pub(super) module: &'static str,
    /// Names of the gate projection, the up projection and the down projection of an expert.
    pub(super) projections: [&'static str; 3],
}

impl Style {
    pub(super) const LLAMA: Style = Style {
        has_qk_norms: false,
        has_output_norms: false,
        norm_weight_offset: 0.0,
        scales_embedding: false,
        expert_names: ExpertNames { module: "mlp", projections: ["gate_proj", "up_proj", "down_proj"] },
    };
}

/// Defaults of transformers for keys that a config lacks.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Defaults {
    /// Default of `head_dim`; `None` for the hidden size divided by the number of heads.
    pub(super) head_dim: Option<usize>,
    /// Default of `num_key_value_heads` if the key is missing; `None` for the number of heads. A null key always means the number of heads.
    pub(super) num_kv_heads: Option<usize>,
    pub(super) tie_word_embeddings: bool,
    /// `None` for 10,000.
    pub(super) theta: Option<f64>,
    /// `None` for 1e-6.
    pub(super) norm_epsilon: Option<f64>,
}

pub(super) fn read_decoder(reader: &Reader<'_>, family: Family, defaults: Defaults) -> Result<ModelConfig> {
    let (hidden_size, num_heads) = (reader.size("hidden_size")?, reader.size("num_attention_heads")?);
    let given_kv_heads = reader.optional_size("num_key_value_heads")?;
    let default_kv_heads = defaults.num_kv_heads.filter(|_| !reader.has("num_key_value_heads"));
    let head_dim = defaults.head_dim.unwrap_or((hidden_size / num_heads).max(1));
    Ok(ModelConfig {
        vocab_size: reader.size("vocab_size")?,
        hidden_size,
        num_layers: reader.size("num_hidden_layers")?,
        num_heads,
        num_kv_heads: given_kv_heads.or(default_kv_heads).unwrap_or(num_heads),
        intermediate_size: reader.size("intermediate_size")?,
        max_position_embeddings: reader.size("max_position_embeddings")?,
        norm_epsilon: reader.number_f32("rms_norm_eps", defaults.norm_epsilon.unwrap_or(1e-6))?,
        tie_word_embeddings: reader.flag("tie_word_embeddings", defaults.tie_word_embeddings)?,
        initializer_range: reader.number_f32("initializer_range", 0.02)?,
        head_dim: reader.optional_size("head_dim")?.unwrap_or(head_dim),
        rope: Some(read_rope(reader, defaults.theta.unwrap_or(10_000.0))?),
        activation: Activation::Silu,
        ..ModelConfig::plain(family)
    })
}

/// Returns the layers that `layer_types` lists as sliding; `None` if the key is missing.
pub(super) fn read_layer_types(reader: &Reader<'_>, num_layers: usize) -> Result<Option<Vec<usize>>> {
    let Some(types) = reader.get("layer_types") else { return Ok(None) };
    let known = ["full_attention", "sliding_attention"].map(Value::from);
    let is_known = |types: &&Vec<Value>| types.len() == num_layers && types.iter().all(|t| known.contains(t));
    let expected = || format!("a list of {num_layers} times {} or {}", known[0], known[1]);
    let types = types.as_array().filter(is_known).ok_or_else(|| wrong("layer_types", types, &expected()))?;
    Ok(Some((0..num_layers).filter(|&layer| types[layer] == known[1]).collect()))
}

/// Returns the window size: 4096 if the key is missing, and `None` if it is null.
pub(super) fn read_window(reader: &Reader<'_>) -> Result<Option<usize>> {
    let given = reader.optional_size("sliding_window")?;
    Ok(if reader.has("sliding_window") { given } else { Some(4096) })
}

/// Reads the attention of the Qwen families, in which some layers may use a sliding window.
pub(super) fn read_qwen_attention(reader: &Reader<'_>, num_layers: usize) -> Result<AttentionConfig> {
    let window = if reader.flag("use_sliding_window", false)? { read_window(reader)? } else { None };
    let types = read_layer_types(reader, num_layers)?;
    let Some(size) = window else {
        return match types {
            Some(layers) if !layers.is_empty() => {
                let expected =
                    "\"full_attention\" for all layers without use_sliding_window and sliding_window";
                Err(wrong("layer_types", &reader.map["layer_types"], expected))
            }
            _ => Ok(AttentionConfig::default()),
        };
    };
    let layers = match types {
        Some(layers) => layers,
        None => (reader.non_negative("max_window_layers", 28)?..num_layers).collect(),
    };
    Ok(AttentionConfig { sliding: Some(SlidingWindow { size, layers }), ..AttentionConfig::default() })
}

/// Returns the value of `sliding_window` from which [`read_window`] reads back the window of this config.
pub(super) fn window_size(config: &ModelConfig) -> Option<usize> {
    config.attention.sliding.as_ref().map(|sliding| sliding.size)
}

/// Returns the value of `layer_types` from which [`read_layer_types`] reads back the layers of this config.
pub(super) fn layer_types(config: &ModelConfig) -> Vec<&'static str> {
    let name = |layer| {
        if config.attention.window(layer).is_some() { "sliding_attention" } else { "full_attention" }
    };
    (0..config.num_layers).map(name).collect()
}

/// Adds the keys that [`read_qwen_attention`] reads to the family's `own` keys.
pub(super) fn write_qwen_attention(config: &ModelConfig, mut own: Value) -> Value {
    let window = window_size(config);
    own["use_sliding_window"] = window.is_some().into();
    own["sliding_window"] = window.into();
    own["layer_types"] = layer_types(config).into();
    own
}

/// Returns the `config.json` of a model, including the family's `own` keys.
pub(super) fn write_decoder(config: &ModelConfig, class: &str, own: Value) -> Value {
    let rope = config.rope.expect("positions are rotary");
    let mut json = json!({
        "architectures": [class],
        "model_type": config.family.name(),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": shortest(config.norm_epsilon),
        "rope_theta": rope.theta,
        "initializer_range": shortest(config.initializer_range),
        "tie_word_embeddings": config.tie_word_embeddings,
        "dtype": "float32",
    });
    if let Some(scaling) = rope.scaling {
        json["rope_scaling"] = scaling.to_json();
    }
    if let (Value::Object(all), Value::Object(own)) = (&mut json, own) {
        all.extend(own);
    }
    json
}
