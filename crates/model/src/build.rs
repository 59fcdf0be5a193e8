//! From a config to units and the table of their parameters, under Hugging Face names.

use crate::block::Block;
use crate::config::{Architecture, ModelConfig};
use crate::model::Unit;
use std::sync::Arc;
use trireme_tensor::tape::{
    Attention, Embedding, InputActivation, Linear, LossHead, Norm, RotaryTable, WeightLayout,
};
use trireme_tensor::{ParameterSpan, ParameterTable};

/// Units in forward order: embedding, blocks, head.
pub(crate) fn build_units(
    config: &ModelConfig,
    rotary: Option<&Arc<RotaryTable>>,
) -> (Vec<Unit>, ParameterTable) {
    let attention = Arc::new(Attention {
        num_heads: config.num_heads,
        num_kv_heads: config.num_kv_heads,
        head_dim: config.head_dim,
        rotary: rotary.cloned(),
    });
    match config.architecture {
        Architecture::Gpt2 => build_gpt2(config, &attention),
        Architecture::Llama => build_llama(config, &attention),
    }
}

fn build_gpt2(config: &ModelConfig, attention: &Arc<Attention>) -> (Vec<Unit>, ParameterTable) {
    let (hidden, inner) = (config.hidden_size, config.intermediate_size);
    let mut table = ParameterTable::default();
    let norm = |table: &mut ParameterTable, name: &str| {
        Arc::new(Norm {
            weight: table.add(format!("{name}.weight"), &[hidden]),
            bias: Some(table.add(format!("{name}.bias"), &[hidden])),
            epsilon: config.norm_epsilon,
            centred: true,
        })
    };
    let linear = |table: &mut ParameterTable, name: String, inputs: usize, outputs: usize, activation| {
        Arc::new(Linear {
            weight: table.add(format!("{name}.weight"), &[inputs, outputs]),
            layout: WeightLayout::InputsFirst,
            bias: Some(table.add(format!("{name}.bias"), &[outputs])),
            activation,
        })
    };
    table.begin_unit("embedding");
    let tokens = table.add("transformer.wte.weight", &[config.vocab_size, hidden]);
    let positions = Some(table.add("transformer.wpe.weight", &[config.max_position_embeddings, hidden]));
    let mut units = vec![Unit::Embedding(Arc::new(Embedding { tokens, positions }))];
    for layer in 0..config.num_layers {
        let name = format!("transformer.h.{layer}");
        table.begin_unit(&name);
        let identity = InputActivation::Identity;
        units.push(Unit::Block(Block {
            attention_norm: norm(&mut table, &format!("{name}.ln_1")),
            qkv: linear(&mut table, format!("{name}.attn.c_attn"), hidden, 3 * hidden, identity),
            attention_output: linear(&mut table, format!("{name}.attn.c_proj"), hidden, hidden, identity),
            mlp_norm: norm(&mut table, &format!("{name}.ln_2")),
            mlp_in: linear(&mut table, format!("{name}.mlp.c_fc"), hidden, inner, identity),
            mlp_out: linear(&mut table, format!("{name}.mlp.c_proj"), inner, hidden, InputActivation::Gelu),
            attention: Arc::clone(attention),
        }));
    }
    table.begin_unit("head");
    let norm = norm(&mut table, "transformer.ln_f");
    let weight = output_weight(config, &mut table, tokens);
    units.push(Unit::Head { norm, loss: Arc::new(LossHead { weight }) });
    (units, table)
}

fn build_llama(config: &ModelConfig, attention: &Arc<Attention>) -> (Vec<Unit>, ParameterTable) {
    let (hidden, inner) = (config.hidden_size, config.intermediate_size);
    let (queries, keys) = (config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim);
    let mut table = ParameterTable::default();
    let norm = |table: &mut ParameterTable, name: String| {
        Arc::new(Norm {
            weight: table.add(format!("{name}.weight"), &[hidden]),
            bias: None,
            epsilon: config.norm_epsilon,
            centred: false,
        })
    };
    // Projections of one input lie side by side, so that one product serves them all.
    let linear =
        |table: &mut ParameterTable, parts: &[(String, usize)], inputs: usize, bias: bool, activation| {
            let stack = |suffix: &str, inner: &[usize]| -> Vec<(String, Vec<usize>)> {
                let shape = |outputs: usize| [&[outputs], inner].concat();
                parts.iter().map(|(name, outputs)| (format!("{name}.{suffix}"), shape(*outputs))).collect()
            };
            Arc::new(Linear {
                weight: table.add_stacked(&stack("weight", &[inputs])),
                layout: WeightLayout::OutputsFirst,
                bias: bias.then(|| table.add_stacked(&stack("bias", &[]))),
                activation,
            })
        };
    table.begin_unit("embedding");
    let tokens = table.add("model.embed_tokens.weight", &[config.vocab_size, hidden]);
    let mut units = vec![Unit::Embedding(Arc::new(Embedding { tokens, positions: None }))];
    for layer in 0..config.num_layers {
        let name = format!("model.layers.{layer}");
        table.begin_unit(&name);
        let projection = |part: &str| format!("{name}.self_attn.{part}_proj");
        let mlp = |part: &str| format!("{name}.mlp.{part}_proj");
        let qkv = [(projection("q"), queries), (projection("k"), keys), (projection("v"), keys)];
        let (identity, swiglu) = (InputActivation::Identity, InputActivation::SwiGlu);
        let (attention_bias, mlp_bias) = (config.attention_bias, config.mlp_bias);
        units.push(Unit::Block(Block {
            attention_norm: norm(&mut table, format!("{name}.input_layernorm")),
            qkv: linear(&mut table, &qkv, hidden, attention_bias, identity),
            attention_output: linear(
                &mut table,
                &[(projection("o"), hidden)],
                queries,
                attention_bias,
                identity,
            ),
            mlp_norm: norm(&mut table, format!("{name}.post_attention_layernorm")),
            mlp_in: linear(
                &mut table,
                &[(mlp("gate"), inner), (mlp("up"), inner)],
                hidden,
                mlp_bias,
                identity,
            ),
            mlp_out: linear(&mut table, &[(mlp("down"), hidden)], inner, mlp_bias, swiglu),
            attention: Arc::clone(attention),
        }));
    }
    table.begin_unit("head");
    let norm = norm(&mut table, "model.norm".to_owned());
    let weight = output_weight(config, &mut table, tokens);
    units.push(Unit::Head { norm, loss: Arc::new(LossHead { weight }) });
    (units, table)
}

fn output_weight(config: &ModelConfig, table: &mut ParameterTable, tokens: ParameterSpan) -> ParameterSpan {
    if config.tie_word_embeddings {
        tokens
    } else {
        table.add("lm_head.weight", &[config.vocab_size, config.hidden_size])
    }
}
