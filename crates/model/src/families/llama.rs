//! llama (Touvron et al., "LLaMA: open and efficient foundation language models", 2023).

use super::{normal, output_weight, token_table};
use crate::config::{ModelConfig, Reader, Rope, shortest, wrong};
use crate::error::ModelError;
use crate::families::Architecture;
use crate::model::Model;
use crate::transformer::{Block, Head, TokenEmbedding};
use crate::unit::Unit;
use serde_json::{Value, json};
use std::sync::Arc;
use trireme_tensor::tape::{Attention, Embedding, InputActivation, Linear, LossHead, Norm, WeightLayout};
use trireme_tensor::{Cut, Initial, Parameter, ParameterTable};

pub(super) fn read(reader: &Reader<'_>) -> Result<ModelConfig, ModelError> {
    reader.require("hidden_act", &[json!("silu")])?;
    // transformers 5 writes rope_parameters; earlier versions rope_theta and rope_scaling.
    let rope = reader.get("rope_parameters").or_else(|| reader.get("rope_scaling"));
    let kind = rope.and_then(|rope| rope.get("rope_type").or_else(|| rope.get("type")));
    if let Some(kind) = kind.filter(|kind| *kind != &json!("default")) {
        return Err(wrong("rope_type", kind, "\"default\" (rotary scaling is not built in)"));
    }
    let theta = match rope.and_then(|rope| rope.get("rope_theta")).and_then(Value::as_f64) {
        Some(theta) if theta > 0.0 && theta.is_finite() => theta,
        Some(theta) => return Err(wrong("rope_theta", &json!(theta), "a positive number")),
        None => reader.number("rope_theta", 10_000.0)?,
    };
    let (hidden_size, num_heads) = (reader.size("hidden_size")?, reader.size("num_attention_heads")?);
    Ok(ModelConfig {
        architecture: Architecture::LLAMA,
        vocab_size: reader.size("vocab_size")?,
        hidden_size,
        num_layers: reader.size("num_hidden_layers")?,
        num_heads,
        num_kv_heads: reader.optional_size("num_key_value_heads")?.unwrap_or(num_heads),
        head_dim: reader.optional_size("head_dim")?.unwrap_or((hidden_size / num_heads).max(1)),
        intermediate_size: reader.size("intermediate_size")?,
        max_position_embeddings: reader.size("max_position_embeddings")?,
        norm_epsilon: reader.number("rms_norm_eps", 1e-6)? as f32,
        tie_word_embeddings: reader.flag("tie_word_embeddings", false)?,
        rope: Some(Rope { theta }),
        attention_bias: reader.flag("attention_bias", false)?,
        mlp_bias: reader.flag("mlp_bias", false)?,
        initializer_range: reader.number("initializer_range", 0.02)? as f32,
    })
}

pub(super) fn write(config: &ModelConfig) -> Value {
    json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": shortest(config.norm_epsilon),
        "rope_theta": config.rope.map(|rope| rope.theta),
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "initializer_range": shortest(config.initializer_range),
        "tie_word_embeddings": config.tie_word_embeddings,
        "dtype": "float32",
    })
}

pub(super) fn build(config: &ModelConfig, attention: &Arc<Attention>) -> Model {
    let (hidden, inner) = (config.hidden_size, config.intermediate_size);
    let (queries, keys) = (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim);
    let mut table = ParameterTable::default();
    let norm = |table: &mut ParameterTable, name: String| {
        Arc::new(Norm {
            weight: table.add(Parameter::vector(format!("{name}.weight"), hidden, Initial::ONES)),
            bias: None,
            epsilon: config.norm_epsilon,
            centred: false,
        })
    };
    let normal = normal(config);
    // Projections of one input lie side by side, so that one product serves them all. They are cut by their outputs, with their
    // biases; the layer after them by its inputs.
    let widening = |table: &mut ParameterTable, parts: &[(String, usize)], has_bias: bool, granule: usize| {
        let cut = Cut::along(0).with_granule(granule);
        let weight = |(name, outputs): &(String, usize)| {
            Parameter::matrix(format!("{name}.weight"), &[*outputs, hidden], normal).with_cut(cut)
        };
        let bias = |(name, outputs): &(String, usize)| {
            Parameter::vector(format!("{name}.bias"), *outputs, Initial::ZEROS).with_cut(cut)
        };
        Arc::new(Linear {
            weight: table.add_stacked(parts.iter().map(weight)),
            layout: WeightLayout::OutputsFirst,
            bias: has_bias.then(|| table.add_stacked(parts.iter().map(bias))),
            activation: InputActivation::Identity,
        })
    };
    let narrowing =
        |table: &mut ParameterTable, name: String, cut: (usize, usize), has_bias: bool, activation| {
            let (inputs, granule) = cut;
            let weight = Parameter::matrix(format!("{name}.weight"), &[hidden, inputs], normal);
            let bias = || Parameter::vector(format!("{name}.bias"), hidden, Initial::ZEROS);
            Arc::new(Linear {
                weight: table.add(weight.with_cut(Cut::along(1).with_granule(granule))),
                layout: WeightLayout::OutputsFirst,
                bias: has_bias.then(|| table.add(bias())),
                activation,
            })
        };
    table.begin_unit("embedding");
    let tokens = table.add(token_table("model.embed_tokens.weight", config));
    let embedding = TokenEmbedding(Arc::new(Embedding { tokens, positions: None }));
    let mut units: Vec<Arc<dyn Unit>> = vec![Arc::new(embedding)];
    for layer in 0..config.num_layers {
        let name = format!("model.layers.{layer}");
        table.begin_unit(&name);
        let projection = |part: &str| format!("{name}.self_attn.{part}_proj");
        let mlp = |part: &str| format!("{name}.mlp.{part}_proj");
        let qkv = [(projection("q"), queries), (projection("k"), keys), (projection("v"), keys)];
        let (identity, swiglu) = (InputActivation::Identity, InputActivation::SwiGlu);
        let (head, attention_bias, mlp_bias) = (config.head_dim, config.attention_bias, config.mlp_bias);
        units.push(Arc::new(Block {
            attention_norm: norm(&mut table, format!("{name}.input_layernorm")),
            qkv: widening(&mut table, &qkv, attention_bias, head),
            attention_output: narrowing(
                &mut table,
                projection("o"),
                (queries, head),
                attention_bias,
                identity,
            ),
            mlp_norm: norm(&mut table, format!("{name}.post_attention_layernorm")),
            mlp_in: widening(&mut table, &[(mlp("gate"), inner), (mlp("up"), inner)], mlp_bias, 1),
            mlp_out: narrowing(&mut table, mlp("down"), (inner, 1), mlp_bias, swiglu),
            attention: Arc::clone(attention),
        }));
    }
    table.begin_unit("head");
    let norm = norm(&mut table, "model.norm".to_owned());
    let weight = output_weight(config, &mut table, tokens);
    units.push(Arc::new(Head { norm, loss: Arc::new(LossHead { weight }) }));
    Model::new(units, table)
}
