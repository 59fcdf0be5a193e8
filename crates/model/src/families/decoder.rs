//! What families have in common that descend from llama: rotary positions, RMS normalisation, gated feed-forward, and the names and
//! layouts of their Hugging Face checkpoints.

use super::{Family, attention, kv_heads, normal, output_weight, token_table};
use crate::config::{
    AttentionConfig, ModelConfig, Reader, Rope, RopeScaling, SlidingWindow, shortest, wrong,
};
use crate::error::ModelError;
use crate::model::Model;
use crate::transformer::{Block, Head, QkNorms, TokenEmbedding};
use crate::unit::Unit;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use trireme_tensor::tape::{
    Embedding, InputActivation, Linear, LossHead, Norm, RotaryTable, Scale, WeightLayout,
};
use trireme_tensor::{Activation, Cut, Initial, Parameter, ParameterTable};

/// In what families differ beside their configs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Style {
    /// Heads of queries and keys are normalised.
    pub(super) has_qk_norms: bool,
    /// Attention and feed-forward are normalised before they are added to the residual stream, too.
    pub(super) has_output_norms: bool,
    /// Added to the weights of norms, which begin at 1 with it.
    pub(super) norm_weight_offset: f32,
    /// Embeddings are multiplied by the root of their width.
    pub(super) scales_embedding: bool,
}

impl Style {
    pub(super) const LLAMA: Style = Style {
        has_qk_norms: false,
        has_output_norms: false,
        norm_weight_offset: 0.0,
        scales_embedding: false,
    };
}

/// What transformers takes for keys that a config does not have.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Defaults {
    /// `None` for an equal share of the hidden size.
    pub(super) head_dim: Option<usize>,
    /// `None` for as many as there are heads, as for a null.
    pub(super) num_kv_heads: Option<usize>,
    pub(super) tie_word_embeddings: bool,
}

/// The keys that all these families have.
pub(super) fn read_decoder(
    reader: &Reader<'_>,
    family: Family,
    defaults: Defaults,
) -> Result<ModelConfig, ModelError> {
    let (hidden_size, num_heads) = (reader.size("hidden_size")?, reader.size("num_attention_heads")?);
    let given_kv_heads = reader.optional_size("num_key_value_heads")?;
    let default_kv_heads = defaults.num_kv_heads.filter(|_| !reader.has("num_key_value_heads"));
    let head_dim = defaults.head_dim.unwrap_or((hidden_size / num_heads).max(1));
    Ok(ModelConfig {
        family,
        vocab_size: reader.size("vocab_size")?,
        hidden_size,
        num_layers: reader.size("num_hidden_layers")?,
        num_heads,
        num_kv_heads: given_kv_heads.or(default_kv_heads).unwrap_or(num_heads),
        head_dim: reader.optional_size("head_dim")?.unwrap_or(head_dim),
        intermediate_size: reader.size("intermediate_size")?,
        max_position_embeddings: reader.size("max_position_embeddings")?,
        norm_epsilon: reader.narrow_number("rms_norm_eps", 1e-6)?,
        tie_word_embeddings: reader.flag("tie_word_embeddings", defaults.tie_word_embeddings)?,
        rope: Some(read_rope(reader)?),
        qkv_bias: false,
        attention_output_bias: false,
        mlp_bias: false,
        activation: Activation::Silu,
        attention: AttentionConfig::default(),
        logit_soft_cap: None,
        initializer_range: reader.narrow_number("initializer_range", 0.02)?,
    })
}

/// transformers 5 writes rope_parameters; earlier versions rope_theta and rope_scaling.
fn read_rope(reader: &Reader<'_>) -> Result<Rope, ModelError> {
    let empty = Map::new();
    let parameters = reader.get("rope_parameters").or_else(|| reader.get("rope_scaling"));
    let map = match parameters {
        None => &empty,
        Some(Value::Object(map)) => map,
        Some(other) => return Err(wrong("rope_parameters", other, "an object")),
    };
    let rope = Reader { map, family: reader.family };
    let theta = match rope.get("rope_theta") {
        Some(_) => rope.number("rope_theta", 1.0)?,
        None => reader.number("rope_theta", 10_000.0)?,
    };
    let kind = rope.get("rope_type").or_else(|| rope.get("type"));
    let scaling = match kind.map_or(Some("default"), Value::as_str) {
        Some("default") => None,
        Some("llama3") => {
            let number = |key: &'static str| match rope.optional_number(key)? {
                Some(number) => Ok(number),
                None => Err(rope.missing(key)),
            };
            Some(RopeScaling {
                factor: number("factor")?,
                low_frequency_factor: number("low_freq_factor")?,
                high_frequency_factor: number("high_freq_factor")?,
                original_positions: rope.size("original_max_position_embeddings")?,
            })
        }
        _ => {
            let found = kind.unwrap_or(&Value::Null);
            return Err(wrong("rope_type", found, "\"default\" or \"llama3\""));
        }
    };
    match scaling {
        Some(RopeScaling { low_frequency_factor: low, high_frequency_factor: high, .. }) if high <= low => {
            Err(wrong("high_freq_factor", &json!(high), &format!("more than low_freq_factor {low}")))
        }
        _ => Ok(Rope { theta, scaling }),
    }
}

/// The layers that `layer_types` says slide, if the config has it.
pub(super) fn read_layer_types(
    reader: &Reader<'_>,
    num_layers: usize,
) -> Result<Option<Vec<usize>>, ModelError> {
    let Some(types) = reader.get("layer_types") else { return Ok(None) };
    let known = ["full_attention", "sliding_attention"].map(Value::from);
    let is_known = |types: &&Vec<Value>| types.len() == num_layers && types.iter().all(|t| known.contains(t));
    let expected = || format!("a list of {num_layers} times {} or {}", known[0], known[1]);
    let types = types.as_array().filter(is_known).ok_or_else(|| wrong("layer_types", types, &expected()))?;
    Ok(Some((0..num_layers).filter(|&layer| types[layer] == known[1]).collect()))
}

/// The window; `None` where the key says null.
pub(super) fn read_window(reader: &Reader<'_>) -> Result<Option<usize>, ModelError> {
    let given = reader.optional_size("sliding_window")?;
    Ok(if reader.has("sliding_window") { given } else { Some(4096) })
}

/// The attention of the Qwen families: some layers may slide.
pub(super) fn read_qwen_attention(
    reader: &Reader<'_>,
    num_layers: usize,
) -> Result<AttentionConfig, ModelError> {
    let window = if reader.flag("use_sliding_window", false)? { read_window(reader)? } else { None };
    let Some(size) = window else { return Ok(AttentionConfig::default()) };
    let layers = match read_layer_types(reader, num_layers)? {
        Some(layers) => layers,
        None => (reader.whole("max_window_layers", 28)?..num_layers).collect(),
    };
    Ok(AttentionConfig { sliding: Some(SlidingWindow { size, layers }), ..AttentionConfig::default() })
}

/// What [`read_window`] reads.
pub(super) fn window_size(config: &ModelConfig) -> Option<usize> {
    config.attention.sliding.as_ref().map(|sliding| sliding.size)
}

/// For each layer what transformers calls its attention.
pub(super) fn layer_types(config: &ModelConfig) -> Vec<&'static str> {
    let name = |layer| {
        if config.attention.window(layer).is_some() { "sliding_attention" } else { "full_attention" }
    };
    (0..config.num_layers).map(name).collect()
}

/// What [`read_qwen_attention`] reads, beside the family's `own` keys.
pub(super) fn write_qwen_attention(config: &ModelConfig, mut own: Value) -> Value {
    let window = window_size(config);
    own["use_sliding_window"] = window.is_some().into();
    own["sliding_window"] = window.into();
    own["layer_types"] = layer_types(config).into();
    own
}

/// The `config.json` of a model, with the family's `own` keys.
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
        json["rope_scaling"] = json!({
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
            "original_max_position_embeddings": scaling.original_positions,
        });
    }
    if let (Value::Object(all), Value::Object(own)) = (&mut json, own) {
        all.extend(own);
    }
    json
}

/// The model of a config.
pub(super) fn build(
    config: &ModelConfig,
    rotary: Option<&Arc<RotaryTable>>,
    table: ParameterTable,
    style: Style,
) -> Model {
    let mut builder = Builder { config, style, table };
    builder.table.begin_unit("embedding");
    let tokens = builder.table.add(token_table("model.embed_tokens.weight", config));
    let scale = style.scales_embedding.then(|| Arc::new(Scale((config.hidden_size as f32).sqrt())));
    let embedding = Arc::new(Embedding { tokens, positions: None });
    let mut units: Vec<Arc<dyn Unit>> = vec![Arc::new(TokenEmbedding { embedding, scale })];
    for layer in 0..config.num_layers {
        units.push(Arc::new(builder.block(layer, rotary)));
    }
    builder.table.begin_unit("head");
    let norm = builder.norm("model.norm", config.hidden_size);
    let weight = output_weight(config, &mut builder.table, tokens);
    let loss = Arc::new(LossHead { weight, soft_cap: config.logit_soft_cap });
    units.push(Arc::new(Head { norm, loss }));
    Model::new(units, builder.table)
}

struct Builder<'a> {
    config: &'a ModelConfig,
    style: Style,
    table: ParameterTable,
}

impl Builder<'_> {
    fn block(&mut self, layer: usize, rotary: Option<&Arc<RotaryTable>>) -> Block {
        let config = self.config;
        let (dim, inner) = (config.head_dim, config.intermediate_size);
        let (queries, keys) = (config.num_heads * dim, config.num_kv_heads * dim);
        let name = format!("model.layers.{layer}");
        self.table.begin_unit(&name);
        let attention_part = |part: &str| format!("{name}.self_attn.{part}");
        let mlp = |part: &str| format!("{name}.mlp.{part}_proj");
        let norm_name = |part: &str| format!("{name}.{part}_layernorm");
        let has_output_norms = self.style.has_output_norms;
        let before_mlp = if has_output_norms { "pre_feedforward" } else { "post_attention" };
        let (heads, kv_heads) = (Cut::along(0).with_granule(dim), kv_heads(dim));
        let qkv = [("q_proj", queries, heads), ("k_proj", keys, kv_heads), ("v_proj", keys, kv_heads)];
        let qkv = qkv.map(|(part, outputs, cut)| (attention_part(part), outputs, cut));
        let mlp_inputs = ["gate", "up"].map(|part| (mlp(part), inner, Cut::along(0)));
        let attention = attention(config, layer, rotary, &self.table);
        let gated = InputActivation::Gated(config.activation);
        let identity = InputActivation::Identity;
        Block {
            attention_norm: self.norm(&norm_name("input"), config.hidden_size),
            qkv: self.column_parallel(&qkv, config.qkv_bias),
            qk_norms: self.style.has_qk_norms.then(|| {
                let norms = ["q_norm", "k_norm"].map(|part| self.norm(&attention_part(part), dim));
                QkNorms::new(norms, &attention)
            }),
            attention,
            attention_output: self.row_parallel(
                &attention_part("o_proj"),
                (queries, dim),
                config.attention_output_bias,
                identity,
            ),
            attention_output_norm: has_output_norms
                .then(|| self.norm(&norm_name("post_attention"), config.hidden_size)),
            mlp_norm: self.norm(&norm_name(before_mlp), config.hidden_size),
            mlp_in: self.column_parallel(&mlp_inputs, config.mlp_bias),
            mlp_out: self.row_parallel(&mlp("down"), (inner, 1), config.mlp_bias, gated),
            mlp_output_norm: has_output_norms
                .then(|| self.norm(&norm_name("post_feedforward"), config.hidden_size)),
        }
    }

    fn norm(&mut self, name: &str, cols: usize) -> Arc<Norm> {
        let offset = self.style.norm_weight_offset;
        let weight = Parameter::vector(format!("{name}.weight"), cols, Initial::Constant(1.0 - offset));
        Arc::new(Norm {
            weight: self.table.add(weight),
            weight_offset: offset,
            bias: None,
            epsilon: self.config.norm_epsilon,
            centred: false,
        })
    }

    /// Projections of one input lie side by side, so that one product serves them all. They are cut by their outputs, with their
    /// biases.
    fn column_parallel(&mut self, parts: &[(String, usize, Cut)], has_bias: bool) -> Arc<Linear> {
        let inputs = self.config.hidden_size;
        let weight = |(name, outputs, cut): &(String, usize, Cut)| {
            let dims = [*outputs, inputs];
            Parameter::matrix(format!("{name}.weight"), &dims, normal(self.config)).with_cut(*cut)
        };
        let bias = |(name, outputs, cut): &(String, usize, Cut)| {
            Parameter::vector(format!("{name}.bias"), *outputs, Initial::ZEROS).with_cut(*cut)
        };
        Arc::new(Linear {
            weight: self.table.add_stacked(parts.iter().map(weight)),
            layout: WeightLayout::OutputsFirst,
            bias: has_bias.then(|| self.table.add_stacked(parts.iter().map(bias))),
            activation: InputActivation::Identity,
        })
    }

    /// The projection back to the residual stream, which is cut by its inputs.
    fn row_parallel(
        &mut self,
        name: &str,
        (inputs, granule): (usize, usize),
        has_bias: bool,
        activation: InputActivation,
    ) -> Arc<Linear> {
        let dims = [self.config.hidden_size, inputs];
        let weight = Parameter::matrix(format!("{name}.weight"), &dims, normal(self.config));
        let bias = Parameter::vector(format!("{name}.bias"), dims[0], Initial::ZEROS);
        Arc::new(Linear {
            weight: self.table.add(weight.with_cut(Cut::along(1).with_granule(granule))),
            layout: WeightLayout::OutputsFirst,
            bias: has_bias.then(|| self.table.add(bias)),
            activation,
        })
    }
}
