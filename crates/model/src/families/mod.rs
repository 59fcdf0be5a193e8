//! Families of models: one file each.
//!
//! A family's file says how its Hugging Face `config.json` is read and written, and builds its units with the names and
//! layouts of its Hugging Face checkpoints.

mod decoder;
mod deepseek_v3;
mod gemma2;
mod gpt2;
mod llama;
mod mistral;
mod mixtral;
mod names;
mod qwen2;
mod qwen3;
mod qwen3_moe;

pub use names::{canonical_names, tied_names};

use crate::config::{ModelConfig, Reader};
use crate::error::ModelError;
use crate::model::Model;
use serde_json::Value;
use std::fmt;
use std::sync::Arc;
use trireme_tensor::tape::{Attention, Dropout, RotaryTable};
use trireme_tensor::{Cut, Initial, Parameter, ParameterSpan, ParameterTable};

/// Every family.
pub(crate) const FAMILIES: &[Family] = &[
    Family::GPT2,
    Family::LLAMA,
    mistral::FAMILY,
    qwen2::FAMILY,
    qwen3::FAMILY,
    gemma2::FAMILY,
    mixtral::FAMILY,
    qwen3_moe::FAMILY,
    deepseek_v3::FAMILY,
];

/// Keys of a `config.json` that change what a model of a family computes, each with the values, as JSON, that are implemented. Null counts as
/// the first one.
pub(crate) type Fixed = &'static [(&'static str, &'static [&'static str])];

/// A family of models.
#[derive(Clone, Copy)]
pub struct Family {
    /// `model_type` in `config.json`.
    name: &'static str,
    pub(crate) fixed: Fixed,
    pub(crate) read: fn(&Reader<'_>) -> Result<ModelConfig, ModelError>,
    pub(crate) write: fn(&ModelConfig) -> Value,
    build: fn(&ModelConfig, Option<&Arc<RotaryTable>>, ParameterTable) -> Model,
}

impl Family {
    /// Learned positions, layer normalisation, GELU, biases (Radford et al. 2019).
    pub const GPT2: Family = gpt2::FAMILY;
    /// Rotary positions, RMS normalisation, SwiGLU, grouped-query attention (Touvron et al. 2023).
    pub const LLAMA: Family = llama::FAMILY;

    /// `model_type` in `config.json`.
    pub fn name(self) -> &'static str {
        self.name
    }
}

impl PartialEq for Family {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for Family {}

impl fmt::Debug for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// The model of a config, with a rotary table if its positions are rotary; its parameters go into `table`.
pub(crate) fn build(config: &ModelConfig, rotary: Option<&Arc<RotaryTable>>, table: ParameterTable) -> Model {
    (config.family.build)(config, rotary, table)
}

/// How ranks of the tensor axis cut heads of keys and values, in elements of `granule`.
fn kv_heads(granule: usize) -> Cut {
    Cut::along(0).with_granule(granule).shared()
}

/// The attention of a layer, by the heads that are here.
fn attention(
    config: &ModelConfig,
    layer: usize,
    rotary: Option<&Arc<RotaryTable>>,
    table: &ParameterTable,
) -> Arc<Attention> {
    let num_heads = table.part_of(Cut::along(0), config.num_heads);
    let num_kv_heads = table.part_of(kv_heads(1), config.num_kv_heads);
    let attention = Attention::new(num_heads, num_kv_heads, config.head_dim, config.attention_rule(layer));
    Arc::new(attention.with_rotary(rotary.cloned()))
}

/// The dropout of this place, if the model is trained with it.
fn dropout(config: &ModelConfig, name: &str) -> Option<Arc<Dropout>> {
    (config.dropout > 0.0).then(|| Arc::new(Dropout::new(format!("{name}.dropout"), config.dropout)))
}

/// Initial values of most matrices.
fn normal(config: &ModelConfig) -> Initial {
    Initial::Normal { standard_deviation: config.initializer_range }
}

/// A row of the residual stream's width for each token.
fn token_table(name: &str, config: &ModelConfig) -> Parameter {
    let dims = [config.vocab_size, config.hidden_size];
    Parameter::embedding(name, &dims, normal(config)).with_cut(Cut::along(0).padded())
}

/// The weight of the output layer: that of the embedding, if they are tied.
fn output_weight(config: &ModelConfig, table: &mut ParameterTable, tokens: ParameterSpan) -> ParameterSpan {
    if config.tie_word_embeddings {
        table.add_tie(tokens)
    } else {
        table.add(token_table(names::OUTPUT_WEIGHT, config))
    }
}
