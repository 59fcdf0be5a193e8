//! Families of models: one file each.
//!
//! A family's file says how its Hugging Face `config.json` is read and written, and builds its units with the names and
//! layouts of its Hugging Face checkpoints.

mod gpt2;
mod llama;

use crate::config::{ModelConfig, Reader};
use crate::error::ModelError;
use crate::model::Model;
use serde_json::Value;
use std::fmt;
use std::sync::Arc;
use trireme_tensor::tape::{Attention, RotaryTable};
use trireme_tensor::{AttentionRule, Cut, Initial, Parameter, ParameterSpan, ParameterTable};

/// Every family.
pub(crate) const FAMILIES: [Architecture; 2] = [Architecture::GPT2, Architecture::LLAMA];

/// A family of models.
#[derive(Clone, Copy)]
pub struct Architecture {
    /// `model_type` in `config.json`.
    name: &'static str,
    pub(crate) read: fn(&Reader<'_>) -> Result<ModelConfig, ModelError>,
    pub(crate) write: fn(&ModelConfig) -> Value,
    build: fn(&ModelConfig, &Arc<Attention>) -> Model,
}

impl Architecture {
    /// Learned positions, layer normalisation, GELU, biases (Radford et al. 2019).
    pub const GPT2: Architecture =
        Architecture { name: "gpt2", read: gpt2::read, write: gpt2::write, build: gpt2::build };
    /// Rotary positions, RMS normalisation, SwiGLU, grouped-query attention (Touvron et al. 2023).
    pub const LLAMA: Architecture =
        Architecture { name: "llama", read: llama::read, write: llama::write, build: llama::build };

    /// `model_type` in `config.json`.
    pub fn name(self) -> &'static str {
        self.name
    }
}

impl PartialEq for Architecture {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl Eq for Architecture {}

impl fmt::Debug for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// The model of a config, with a rotary table if its positions are rotary.
pub(crate) fn build(config: &ModelConfig, rotary: Option<Arc<RotaryTable>>) -> Model {
    let attention = Attention {
        num_heads: config.num_heads,
        num_kv_heads: config.num_kv_heads,
        head_dim: config.head_dim,
        rule: AttentionRule::causal(config.head_dim),
        is_padded: false,
        rotary,
    };
    (config.architecture.build)(config, &Arc::new(attention))
}

/// Initial values of most matrices.
fn normal(config: &ModelConfig) -> Initial {
    Initial::Normal { standard_deviation: config.initializer_range }
}

/// A row of the residual stream's width for each token.
fn token_table(name: &str, config: &ModelConfig) -> Parameter {
    let dims = [config.vocab_size, config.hidden_size];
    Parameter::embedding(name, &dims, normal(config)).with_cut(Cut::along(0))
}

/// The weight of the output layer: that of the embedding, if they are tied.
fn output_weight(config: &ModelConfig, table: &mut ParameterTable, tokens: ParameterSpan) -> ParameterSpan {
    if config.tie_word_embeddings {
        table.add_tie(tokens)
    } else {
        table.add(token_table("lm_head.weight", config))
    }
}
