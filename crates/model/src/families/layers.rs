//! Layers and parameters that all families have in common.

use super::names;
use crate::config::ModelConfig;
use std::sync::Arc;
use trireme_tensor::tape::{Attention, Dropout, RotaryTable};
use trireme_tensor::{Cut, Initial, Parameter, ParameterSpan, ParameterTable};

/// How ranks of the tensor axis cut heads of keys and values, in elements of `granule`.
pub(super) fn kv_heads(granule: usize) -> Cut {
    Cut::along(0).with_granule(granule).shared()
}

pub(super) fn attention(
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
pub(super) fn dropout(config: &ModelConfig, name: &str) -> Option<Arc<Dropout>> {
    (config.dropout > 0.0).then(|| Arc::new(Dropout::new(format!("{name}.dropout"), config.dropout)))
}

pub(super) fn normal(config: &ModelConfig) -> Initial {
    Initial::Normal { standard_deviation: config.initializer_range }
}

/// A row of the residual stream's width for each token.
pub(super) fn token_table(name: &str, config: &ModelConfig) -> Parameter {
    let dims = [config.vocab_size, config.hidden_size];
    Parameter::embedding(name, &dims, normal(config)).with_cut(Cut::along(0).padded())
}

/// The weight of the output layer: that of the embedding, if they are tied.
pub(super) fn output_weight(
    config: &ModelConfig,
    table: &mut ParameterTable,
    tokens: ParameterSpan,
) -> ParameterSpan {
    if config.tie_word_embeddings {
        table.add_tie(tokens)
    } else {
        table.add(token_table(names::OUTPUT_WEIGHT, config))
    }
}
