//! gpt2 (Radford et al., "Language models are unsupervised multitask learners", 2019).

use super::layers::{attention, dropout, normal_initial, output_weight, token_table};
use crate::config::{AttentionConfig, Family, ModelConfig, Reader, shortest};
use crate::error::Result;
use crate::model::Model;
use crate::transformer::{Block, Head, Mlp, ResidualProjection, SelfAttention, TokenEmbedding};
use crate::unit::Unit;
use serde_json::{Value, json};
use std::sync::Arc;
use trireme_tensor::tape::{Embedding, InputActivation, Linear, LossHead, Norm, RotaryTable, WeightLayout};
use trireme_tensor::{Activation, AxisSplit, Initial, Parameter, ParameterTable};

pub(super) const FAMILY: Family = Family {
    name: "gpt2",
    supported_values: &[
        ("activation_function", &[r#""gelu_new""#, r#""gelu_pytorch_tanh""#, r#""gelu""#]),
        ("reorder_and_upcast_attn", &["false"]),
        ("add_cross_attention", &["false"]),
        ("pruned_heads", &["{}"]),
    ],
    read,
    write,
    build,
};

impl ModelConfig {
    /// Returns the config of a GPT-2. The caller must set its sizes, which are 0.
    pub fn gpt2() -> Self {
        let plain = ModelConfig::plain(FAMILY);
        ModelConfig { qkv_bias: true, attention_output_bias: true, mlp_bias: true, ..plain }
    }
}

fn read(reader: &Reader<'_>) -> Result<ModelConfig> {
    let is_exact = reader.get("activation_function") == Some(&json!("gelu"));
    let (hidden_size, num_heads) = (reader.size("n_embd")?, reader.size("n_head")?);
    Ok(ModelConfig {
        vocab_size: reader.size("vocab_size")?,
        hidden_size,
        num_layers: reader.size("n_layer")?,
        num_heads,
        num_kv_heads: num_heads,
        head_dim: hidden_size / num_heads,
        intermediate_size: reader.optional_size("n_inner")?.unwrap_or(4 * hidden_size),
        max_position_embeddings: reader.size("n_positions")?,
        norm_epsilon: reader.number_f32("layer_norm_epsilon", 1e-5)?,
        tie_word_embeddings: reader.flag("tie_word_embeddings", true)?,
        initializer_range: reader.number_f32("initializer_range", 0.02)?,
        activation: if is_exact { Activation::ExactGelu } else { Activation::Gelu },
        attention: AttentionConfig {
            scale: (!reader.flag("scale_attn_weights", true)?).then_some(1.0),
            scales_by_layer: reader.flag("scale_attn_by_inverse_layer_idx", false)?,
            ..AttentionConfig::default()
        },
        ..ModelConfig::gpt2()
    })
}

fn write(config: &ModelConfig) -> Value {
    json!({
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.max_position_embeddings,
        "n_embd": config.hidden_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.intermediate_size,
        "activation_function": if config.activation == Activation::ExactGelu { "gelu" } else { "gelu_new" },
        "scale_attn_weights": config.attention.scale.is_none(),
        "scale_attn_by_inverse_layer_idx": config.attention.scales_by_layer,
        "layer_norm_epsilon": shortest(config.norm_epsilon),
        "initializer_range": shortest(config.initializer_range),
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": config.tie_word_embeddings,
        "dtype": "float32",
    })
}

fn build(config: &ModelConfig, rotary: Option<&Arc<RotaryTable>>, mut table: ParameterTable) -> Model {
    let (hidden, inner) = (config.hidden_size, config.intermediate_size);
    let norm = |table: &mut ParameterTable, name: &str| {
        Arc::new(Norm {
            weight: table.add(Parameter::vector(format!("{name}.weight"), hidden, Initial::ONES)),
            bias: Some(table.add(Parameter::vector(format!("{name}.bias"), hidden, Initial::ZEROS))),
            weight_offset: 0.0,
            epsilon: config.norm_epsilon,
            is_centered: true,
        })
    };
    let normal = normal_initial(config);
    // Initial weights of layers that add to the residual stream are divided by the square root of the number of these layers (Radford et
    // al. 2019, section 2.3).
    let residual_divisor = (2.0 * config.num_layers as f32).sqrt();
    let residual_initial =
        Initial::Normal { standard_deviation: config.initializer_range / residual_divisor };
    // A column-parallel layer is split by its outputs, with its bias. The row-parallel layer after it is split by its inputs.
    let column_parallel = |table: &mut ParameterTable, name: String, outputs: usize, split: AxisSplit| {
        let weight =
            Parameter::matrix(format!("{name}.weight"), &[hidden, outputs], normal).with_split(split);
        let bias = Parameter::vector(format!("{name}.bias"), outputs, Initial::ZEROS);
        Arc::new(Linear {
            weight: table.add(weight),
            layout: WeightLayout::InputsFirst,
            bias: Some(table.add(bias.with_split(AxisSplit { dim: 0, ..split }))),
            activation: InputActivation::Identity,
        })
    };
    let row_parallel =
        |table: &mut ParameterTable, name: String, inputs: usize, granule: usize, activation| {
            let weight = Parameter::matrix(format!("{name}.weight"), &[inputs, hidden], residual_initial);
            let bias = Parameter::vector(format!("{name}.bias"), hidden, Initial::ZEROS);
            Arc::new(Linear {
                weight: table.add(weight.with_split(AxisSplit::along(0).with_granule(granule))),
                layout: WeightLayout::InputsFirst,
                bias: Some(table.add(bias)),
                activation,
            })
        };
    table.begin_unit("embedding");
    let tokens = table.add(token_table("transformer.wte.weight", config));
    let positions = [config.max_position_embeddings, hidden];
    let positions = Some(table.add(Parameter::embedding("transformer.wpe.weight", &positions, normal)));
    let embedding = TokenEmbedding {
        embedding: Arc::new(Embedding { tokens, positions }),
        scale: None,
        dropout: dropout(config, "embedding"),
    };
    let mut units: Vec<Arc<dyn Unit>> = vec![Arc::new(embedding)];
    for layer in 0..config.num_layers {
        let name = format!("transformer.h.{layer}");
        table.begin_unit(&name);
        let (head, identity) = (config.head_dim, InputActivation::Identity);
        let qkv = AxisSplit::along(1).with_groups(3).with_granule(head);
        let activation = InputActivation::Elementwise(config.activation);
        let residual_projection = |table: &mut ParameterTable, name: String, inputs, granule, activation| {
            let dropout = dropout(config, &name);
            ResidualProjection::new(row_parallel(table, name, inputs, granule, activation), dropout)
        };
        let attention = SelfAttention {
            norm: norm(&mut table, &format!("{name}.ln_1")),
            qkv: column_parallel(&mut table, format!("{name}.attn.c_attn"), 3 * hidden, qkv),
            qk_norms: None,
            attention: attention(config, layer, rotary, &table),
            output: residual_projection(&mut table, format!("{name}.attn.c_proj"), hidden, head, identity),
        };
        let mlp = Mlp {
            norm: norm(&mut table, &format!("{name}.ln_2")),
            up: column_parallel(&mut table, format!("{name}.mlp.c_fc"), inner, AxisSplit::along(1)),
            down: residual_projection(&mut table, format!("{name}.mlp.c_proj"), inner, 1, activation),
        };
        units.push(Arc::new(Block(vec![Box::new(attention), Box::new(mlp)])));
    }
    table.begin_unit("head");
    let norm = norm(&mut table, "transformer.ln_f");
    let weight = output_weight(config, &mut table, tokens);
    units.push(Arc::new(Head { norm, loss: Arc::new(LossHead { weight, soft_cap: None }) }));
    Model::new(units, table)
}
