//! Layers and parameters common to all families.

use super::names;
use crate::config::ModelConfig;
use std::sync::Arc;
use trireme_tensor::tape::{Attention, Dropout, RotaryTable};
use trireme_tensor::{AxisSplit, Initial, Parameter, ParameterSpan, ParameterTable};

/// Returns how the tensor axis splits heads of keys and values, in units of `granule` elements.
pub(super) fn kv_head_split(granule: usize) -> AxisSplit {
    AxisSplit::along(0).with_granule(granule).shared()
}

pub(super) fn attention(
    config: &ModelConfig,
    layer: usize,
    rotary: Option<&Arc<RotaryTable>>,
    table: &ParameterTable,
) -> Arc<Attention> {
    let num_heads = table.part_len(AxisSplit::along(0), config.num_heads);
    let num_kv_heads = table.part_len(kv_head_split(1), config.num_kv_heads);
    let attention = Attention::new(num_heads, num_kv_heads, config.head_dim, config.attention_rule(layer));
    Arc::new(attention.with_rotary(rotary.cloned()))
}

/// Returns the dropout layer with this name, if the config has dropout.
pub(super) fn dropout(config: &ModelConfig, name: &str) -> Option<Arc<Dropout>> {
    (config.dropout > 0.0).then(|| Arc::new(Dropout::new(format!("{name}.dropout"), config.dropout)))
}

pub(super) fn normal_initial(config: &ModelConfig) -> Initial {
    Initial::Normal { standard_deviation: config.initializer_range }
}

/// Returns the declaration of an embedding table, `[vocab_size, hidden_size]`.
pub(super) fn token_table(name: &str, config: &ModelConfig) -> Parameter {
    let dims = [config.vocab_size, config.hidden_size];
    Parameter::embedding(name, &dims, normal_initial(config)).with_split(AxisSplit::along(0).padded())
}

/// Returns the weight of the output layer: the embedding's, if they are tied.
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
