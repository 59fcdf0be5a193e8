//! Hugging Face `config.json`, read into one description for every family.

mod experts;
mod reader;
mod rope;

pub use experts::{ExchangeConfig, ExpertsConfig, LatentConfig, RouterScores};
pub(crate) use reader::{Reader, shortest, wrong};
pub(crate) use rope::read_rope;
pub use rope::{Llama3Scaling, Rope, RopeScaling, YarnScaling};

use crate::error::ModelError;
use crate::families::{self, FAMILIES, Family};
use crate::model::Model;
use serde_json::{Value, json};
use std::sync::Arc;
use trireme_base::{json_text, parse_json};
use trireme_tensor::tape::{DynamicScaling, RotaryTable};
use trireme_tensor::{Activation, AttentionRule, Device, ParameterTable};

/// Everything that determines a model's parameters and arithmetic.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Family.
    pub family: Family,
    /// Tokens that can be read and predicted.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Transformer blocks.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key-value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Elements of a head of queries or keys.
    pub head_dim: usize,
    /// How heads are made from latent vectors, if they are.
    pub latent: Option<LatentConfig>,
    /// Width between the two linear layers of a block, where these are no experts.
    pub intermediate_size: usize,
    /// Longest sequence.
    pub max_position_embeddings: usize,
    /// Added to variances and mean squares.
    pub norm_epsilon: f32,
    /// Whether the output layer is the token embedding.
    pub tie_word_embeddings: bool,
    /// Rotary positions, if positions are not learned.
    pub rope: Option<Rope>,
    /// Biases of the projections to queries, keys and values.
    pub qkv_bias: bool,
    /// Bias of the projection after attention.
    pub attention_output_bias: bool,
    /// Biases in the feed-forward projections.
    pub mlp_bias: bool,
    /// What is applied between the feed-forward projections, by gates or without.
    pub activation: Activation,
    /// The layers whose feed-forward layers are experts, if there are such.
    pub experts: Option<ExpertsConfig>,
    /// How queries and keys make scores.
    pub attention: AttentionConfig,
    /// Bound of logits.
    pub logit_soft_cap: Option<f32>,
    /// Standard deviation of random initial weights.
    pub initializer_range: f32,
    /// Probability with which elements of the embedding, and of what layers add to it, are dropped in training. No part of a `config.json`.
    pub dropout: f32,
}

/// How queries and keys make scores. The default is plain causal attention.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AttentionConfig {
    /// What products of queries and keys are multiplied by; `None` for `1 / sqrt(head_dim)`.
    pub scale: Option<f32>,
    /// Whether that is divided by the number of the layer, counted from 1.
    pub scales_by_layer: bool,
    /// Bound of scores.
    pub soft_cap: Option<f32>,
    /// The layers that see only the nearest keys, if there are such.
    pub sliding: Option<SlidingWindow>,
}

/// Attention to the nearest keys (Beltagy et al., "Longformer", 2020, section 3.1).
#[derive(Debug, Clone, PartialEq)]
pub struct SlidingWindow {
    /// Keys that a query sees, its own included.
    pub size: usize,
    /// The layers that have the window, counted from 0.
    pub layers: Vec<usize>,
}

impl AttentionConfig {
    /// The window of a layer, if it has one.
    pub(crate) fn window(&self, layer: usize) -> Option<usize> {
        let sliding = self.sliding.as_ref()?;
        sliding.layers.contains(&layer).then_some(sliding.size)
    }
}

impl ModelConfig {
    /// The settings in which this model computes something else than `other`: each with both values, named as `[model]` names
    /// them. How weights are initialized is no such setting.
    pub fn differences(&self, other: &Self) -> Vec<String> {
        // Derived sizes follow what they are derived from.
        let settings = |config: &Self| {
            let windows = match &config.attention.sliding {
                Some(SlidingWindow { size, layers }) if !layers.is_empty() => {
                    format!("{size} in layers {layers:?}")
                }
                _ => "none".to_owned(),
            };
            // Rotary positions have no parameters, and depend on their number only where it scales them.
            let is_dynamic = |rope: Rope| matches!(rope.scaling, Some(RopeScaling::Dynamic { .. }));
            let depends = config.rope.is_none_or(is_dynamic);
            let positions = depends.then_some(config.max_position_embeddings);
            // How experts are trained is no part of what a model computes.
            let training_left_out = |experts: &ExpertsConfig| ExpertsConfig {
                balance_loss: 0.0,
                z_loss: 0.0,
                capacity_factor: None,
                exchange: ExchangeConfig::default(),
                ..experts.clone()
            };
            [
                ("model_type", config.family.name().to_owned()),
                ("vocab_size", config.vocab_size.to_string()),
                ("hidden_size", config.hidden_size.to_string()),
                ("num_layers", config.num_layers.to_string()),
                ("num_heads", config.num_heads.to_string()),
                ("num_kv_heads", config.num_kv_heads.to_string()),
                ("head_dim", config.head_dim.to_string()),
                ("intermediate_size", config.intermediate_size.to_string()),
                ("max_position_embeddings", format!("{}", positions.unwrap_or_default())),
                ("norm_eps", config.norm_epsilon.to_string()),
                ("tie_word_embeddings", config.tie_word_embeddings.to_string()),
                ("rope_theta", config.rope.map_or_else(String::new, |rope| rope.theta.to_string())),
                ("rope_scaling", format!("{:?}", config.rope.and_then(|rope| rope.scaling))),
                ("qkv_bias", config.qkv_bias.to_string()),
                ("attention_output_bias", config.attention_output_bias.to_string()),
                ("mlp_bias", config.mlp_bias.to_string()),
                (
                    "latent attention",
                    config.latent.map_or_else(|| "none".to_owned(), |latent| format!("{latent:?}")),
                ),
                (
                    "experts",
                    config
                        .experts
                        .as_ref()
                        .map(training_left_out)
                        .map_or_else(|| "none".to_owned(), |experts| format!("{experts:?}")),
                ),
                ("activation", format!("{:?}", config.activation)),
                ("attention_scale", config.attention_rule(0).scale.to_string()),
                ("scales_by_layer", config.attention.scales_by_layer.to_string()),
                ("attention_soft_cap", format!("{:?}", config.attention.soft_cap)),
                ("logit_soft_cap", format!("{:?}", config.logit_soft_cap)),
                ("sliding_window", windows),
            ]
        };
        let pairs = settings(self).into_iter().zip(settings(other));
        let differing = pairs.filter(|((_, own), (_, other))| own != other);
        differing.map(|((name, own), (_, other))| format!("{name} {own} instead of {other}")).collect()
    }
}

/// Blocks beyond which a config is taken for damaged rather than large: each has names and descriptions of its own.
const LAYERS_MAX: usize = 4096;

/// Positions that scaling may reach: the largest `max_position_embeddings` that is read.
const POSITIONS_MAX: usize = 1 << 24;

impl ModelConfig {
    /// Reads the text of a `config.json` whose `model_type` is a [family](Family) of Trireme's.
    pub fn from_json(text: &str) -> Result<Self, ModelError> {
        let value = parse_json(text.as_bytes()).map_err(ModelError::NotJson)?;
        let Value::Object(map) = &value else { return Err(wrong("config.json", &value, "an object")) };
        let found = map.get("model_type").unwrap_or(&Value::Null);
        let known = FAMILIES.iter().find(|family| found.as_str() == Some(family.name()));
        let family = *known.ok_or_else(|| {
            let names: Vec<String> = FAMILIES.iter().map(|family| format!("\"{}\"", family.name())).collect();
            wrong("model_type", found, &names.join(" or "))
        })?;
        let reader = Reader { map, family };
        family.fixed.iter().try_for_each(|(key, accepted)| reader.require(key, accepted))?;
        let config = (family.read)(&reader)?;
        config.check()?;
        Ok(config)
    }

    /// The keys by which a `config.json` asks for dropout, with their rates, such as `resid_pdrop = 0.1`. Training leaves it out unless
    /// the user asks for dropout as well.
    pub fn dropout_keys(text: &str) -> Vec<String> {
        let value = parse_json(text.as_bytes()).unwrap_or_default();
        ["resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout"]
            .into_iter()
            .filter(|key| value[key].as_f64().is_some_and(|rate| rate > 0.0))
            .map(|key| format!("{key} = {}", value[key]))
            .collect()
    }

    /// Checks that the sizes fit each other.
    pub fn check(&self) -> Result<(), ModelError> {
        let fits = |key: &str, found: usize, divides: bool, expected: String| {
            if divides { Ok(()) } else { Err(wrong(key, &json!(found), &expected)) }
        };
        let (heads, layers) = (self.num_heads, self.num_layers);
        fits("num_hidden_layers", layers, layers <= LAYERS_MAX, format!("at most {LAYERS_MAX} layers"))?;
        fits(
            "num_key_value_heads",
            self.num_kv_heads,
            heads.is_multiple_of(self.num_kv_heads),
            format!("a divisor of {heads} heads"),
        )?;
        if let Some(Rope { theta, .. }) = self.rope
            && theta < 1.0
        {
            return Err(wrong("rope_theta", &json!(theta), "a number from 1"));
        }
        if self.rope.is_some() {
            let (key, dim) = self.rotary_dim();
            fits(key, dim, dim.is_multiple_of(2), "an even number, for rotary pairs".into())?;
            let is_dynamic = self.max_positions() > self.max_position_embeddings;
            fits(key, dim, dim > 2 || !is_dynamic, "more than 2 with rope_type \"dynamic\"".into())?;
        } else {
            let hidden = self.hidden_size;
            fits("n_head", heads, hidden.is_multiple_of(heads), format!("a divisor of n_embd {hidden}"))?;
        }
        Ok(())
    }

    /// Tokens of the longest sequence: `max_position_embeddings`, times the factor of `rope_type` `dynamic`, which is for longer sequences.
    pub fn max_positions(&self) -> usize {
        match self.rope.and_then(|rope| rope.scaling) {
            Some(RopeScaling::Dynamic { factor }) if factor > 1.0 => {
                (self.max_position_embeddings as f64 * factor).min(POSITIONS_MAX as f64) as usize
            }
            _ => self.max_position_embeddings,
        }
    }

    /// Elements of what is rotated of a head, with the key that says so.
    fn rotary_dim(&self) -> (&'static str, usize) {
        self.latent.map_or(("head_dim", self.head_dim), |latent| ("qk_rope_head_dim", latent.rotary_dim))
    }

    /// The experts of a layer, if it has any.
    pub(crate) fn experts_of(&self, layer: usize) -> Option<&ExpertsConfig> {
        self.experts.as_ref().filter(|experts| experts.layers.contains(&layer))
    }

    /// How a layer attends.
    pub(crate) fn attention_rule(&self, layer: usize) -> AttentionRule {
        let causal = AttentionRule::causal(self.head_dim);
        let divisor = if self.attention.scales_by_layer { (layer + 1) as f32 } else { 1.0 };
        AttentionRule {
            window: self.attention.window(layer),
            scale: self.attention.scale.unwrap_or(causal.scale) / divisor,
            soft_cap: self.attention.soft_cap,
            ..causal
        }
    }

    /// The model, to run on sequences of at most `seq_len_max` tokens. A [`Past`](crate::Past) has a limit of its own.
    ///
    /// # Errors
    /// Sizes that do not fit each other, or no memory for tables of positions.
    pub fn build(&self, seq_len_max: usize, device: &Device) -> Result<Model, ModelError> {
        self.build_into(ParameterTable::default(), seq_len_max, device)
    }

    /// As [`build`](ModelConfig::build), with parameters in `table`, which is empty: what a rank of the tensor axis has of the model.
    ///
    /// # Errors
    /// As those of [`build`](ModelConfig::build).
    ///
    /// # Panics
    /// If so many ranks [cannot cut](ParameterTable::check_degree) the model.
    pub fn build_into(
        &self,
        table: ParameterTable,
        seq_len_max: usize,
        device: &Device,
    ) -> Result<Model, ModelError> {
        self.check()?;
        let angles = |rope: &Rope| {
            let frequencies = rope.frequencies(self.rotary_dim().1);
            let table = match rope.scaling {
                Some(RopeScaling::Dynamic { factor }) => {
                    let scaling = DynamicScaling { factor, original_positions: self.max_position_embeddings };
                    RotaryTable::dynamic(device, seq_len_max, &frequencies, scaling)
                }
                _ => RotaryTable::new(device, seq_len_max, &frequencies, rope.amplitude()),
            };
            table.map(Arc::new)
        };
        Ok(families::build(self, self.rope.as_ref().map(angles).transpose()?.as_ref(), table))
    }

    /// The `config.json` that reads back as this model, where `text` is the one that it was read from before some of it was changed: what
    /// has not changed, and what is not used here, stays as it is. A `quantization_config` does not stay: weights are floating-point numbers.
    ///
    /// # Errors
    /// If `text` describes no model.
    pub fn to_json_within(&self, text: &str) -> Result<String, ModelError> {
        let read = Self::from_json(text)?;
        let (Value::Object(own), Value::Object(before)) = (self.to_json(), read.to_json()) else {
            unreachable!("a model is written as an object");
        };
        let changed: Vec<_> = own.into_iter().filter(|(key, value)| before.get(key) != Some(value)).collect();
        let mut value = parse_json(text.as_bytes()).map_err(ModelError::NotJson)?;
        let map = value.as_object_mut().expect("a model is read from an object");
        if map.shift_remove("quantization_config").is_none() && changed.is_empty() {
            // Other programs refuse a byte order mark.
            return Ok(text.trim_start_matches('\u{feff}').to_owned());
        }
        map.extend(changed);
        Ok(json_text(&value) + "\n")
    }

    /// The `config.json` that reads back as this model.
    pub fn to_json(&self) -> Value {
        (self.family.write)(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GPT2: &str = r#"{"model_type":"gpt2","vocab_size":96,"n_positions":64,"n_embd":48,"n_layer":2,"n_head":4,
        "n_inner":null,"layer_norm_epsilon":1e-05,"resid_pdrop":0.1}"#;
    const LLAMA: &str = r#"{"model_type":"llama","vocab_size":96,"hidden_size":48,"intermediate_size":80,
        "num_hidden_layers":2,"num_attention_heads":6,"num_key_value_heads":2,"head_dim":8,"max_position_embeddings":64,
        "rope_parameters":{"rope_theta":5000.0,"rope_type":"default"}}"#;

    #[test]
    fn configs_read_back_as_written() {
        for text in [GPT2, LLAMA] {
            let config = ModelConfig::from_json(text).unwrap();
            assert_eq!(ModelConfig::from_json(&config.to_json().to_string()).unwrap(), config);
        }
        let llama = ModelConfig::from_json(LLAMA).unwrap();
        assert_eq!(
            (llama.rope.unwrap().theta, llama.num_kv_heads, llama.tie_word_embeddings),
            (5000.0, 2, false)
        );
        assert_eq!(ModelConfig::dropout_keys(GPT2), ["resid_pdrop = 0.1"]);
        assert!(ModelConfig::dropout_keys(LLAMA).is_empty());
    }

    #[test]
    fn what_is_not_used_stays() {
        let config = ModelConfig::from_json(GPT2).unwrap();
        assert_eq!(config.to_json_within(GPT2).unwrap(), GPT2);
        let changed = ModelConfig { vocab_size: 97, ..config };
        let written: Value = serde_json::from_str(&changed.to_json_within(GPT2).unwrap()).unwrap();
        assert_eq!((&written["vocab_size"], &written["resid_pdrop"]), (&97.into(), &0.1.into()));
        assert!(changed.to_json_within("{}").is_err());
    }

    #[test]
    fn a_config_of_python_is_read_and_kept() {
        let text = GPT2.replace("null", "null,\"time_step_limit\":[0.0,Infinity]");
        let config = ModelConfig::from_json(&format!("\u{feff}{text}")).unwrap();
        assert_eq!(config, ModelConfig::from_json(GPT2).unwrap());
        assert_eq!(config.to_json_within(&format!("\u{feff}{text}")).unwrap(), text);
        let changed = ModelConfig { vocab_size: 97, ..config };
        let written = changed.to_json_within(&text).unwrap();
        assert!(written.contains("Infinity\n"), "{written}");
        assert_eq!(ModelConfig::from_json(&written).unwrap(), changed);
        let refused = ModelConfig::from_json(&text.replace("1e-05", "Infinity")).unwrap_err().to_string();
        assert!(refused.contains("'layer_norm_epsilon' is Infinity; expected"), "{refused}");
    }

    #[test]
    fn rotary_parameters_nested_by_layer_type_are_read_where_they_agree() {
        let flat = r#"{"rope_theta":5000.0,"rope_type":"default"}"#;
        let other = flat.replace("5000", "6000");
        let nested = |full: &str, sliding: &str| {
            format!(r#"{{"full_attention":{full},"sliding_attention":{sliding}}}"#)
        };
        let read = |parameters: &str| ModelConfig::from_json(&LLAMA.replace(flat, parameters));
        assert_eq!(read(&nested(flat, flat)).unwrap(), ModelConfig::from_json(LLAMA).unwrap());
        assert_eq!(read(&nested(&other, "null")).unwrap().rope.unwrap().theta, 6000.0);
        for (parameters, expected) in [
            (nested(flat, &other), "the same parameters for all types of layers"),
            (format!(r#"{{"local":{flat}}}"#), "those of full_attention and sliding_attention"),
            (
                flat.replace("}", r#","partial_rotary_factor":0.5}"#),
                "'partial_rotary_factor' is 0.5; expected 1",
            ),
        ] {
            let refused = read(&parameters).unwrap_err().to_string();
            assert!(refused.contains(expected), "{refused}");
        }
    }

    #[test]
    fn keys_that_are_not_implemented_are_refused_by_name() {
        for family in FAMILIES {
            for (key, accepted) in family.fixed {
                let config = |value: &str| format!(r#"{{"model_type":"{}","{key}":{value}}}"#, family.name());
                let refusal = |value: &str| ModelConfig::from_json(&config(value)).unwrap_err().to_string();
                let refused = refusal("\"other\"");
                assert!(
                    refused.contains(&format!("'{key}' is \"other\"; expected {}", accepted[0])),
                    "{refused}"
                );
                for value in *accepted {
                    assert!(refusal(value).contains("lacks"), "{}", config(value));
                }
            }
        }
    }

    #[test]
    fn layers_that_slide_need_a_window() {
        let qwen2 = LLAMA.replace("llama", "qwen2");
        let read = |types: &str, more: &str| {
            let keys = format!("\"layer_types\":[\"full_attention\",\"{types}\"]{more},\"rope_parameters\"");
            ModelConfig::from_json(&qwen2.replace("\"rope_parameters\"", &keys))
        };
        let window = ",\"use_sliding_window\":true,\"sliding_window\":8";
        let sliding = read("sliding_attention", window).unwrap();
        assert_eq!((sliding.attention.window(0), sliding.attention.window(1)), (None, Some(8)));
        assert_eq!(read("full_attention", "").unwrap().attention.window(1), None);
        let refused = read("sliding_attention", ",\"sliding_window\":8").unwrap_err().to_string();
        assert!(refused.contains("'layer_types'") && refused.contains("use_sliding_window"), "{refused}");
    }

    #[test]
    fn what_transformers_reads_first_counts() {
        let flat = r#""rope_parameters":{"rope_theta":5000.0,"rope_type":"default"}"#;
        let both = LLAMA.replace(
            flat,
            &format!(r#"{flat},"rope_scaling":{{"type":"linear","factor":2.0}},"rope_theta":7.0"#),
        );
        let rope = ModelConfig::from_json(&both).unwrap().rope.unwrap();
        assert_eq!(rope, Rope { theta: 7.0, scaling: Some(RopeScaling::Linear { factor: 2.0 }) });
        let yarn = r#""rope_scaling":{"type":"yarn","factor":2.0,"original_max_position_embeddings":16}"#;
        let outside = LLAMA.replace(flat, &format!(r#"{yarn},"original_max_position_embeddings":32"#));
        match ModelConfig::from_json(&outside).unwrap().rope.unwrap().scaling {
            Some(RopeScaling::Yarn(scaling)) => assert_eq!(scaling.original_positions, 32),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_quantization_does_not_stay() {
        let text = GPT2.replace("null", "null,\"quantization_config\":{\"quant_method\":\"gptq\"}");
        let config = ModelConfig::from_json(&text).unwrap();
        let written: Value = serde_json::from_str(&config.to_json_within(&text).unwrap()).unwrap();
        assert_eq!((written.get("quantization_config"), &written["resid_pdrop"]), (None, &0.1.into()));
    }

    #[test]
    fn refusals_name_the_key_and_what_is_expected() {
        let refusals = [
            ("{", "not valid JSON"),
            (r#"{"model_type":"bert"}"#, "\"gpt2\" or \"llama\" or"),
            (r#"{"model_type":"gpt2"}"#, "lacks 'n_embd'"),
            (&GPT2.replace("48", "50"), "a divisor of n_embd 50"),
            (&GPT2.replace("48", "-1"), "whole number"),
            (&GPT2.replace("48", "99999999999"), "16777216"),
            (&GPT2.replace(r#""n_layer":2"#, r#""n_layer":5000"#), "at most 4096 layers"),
            (
                &LLAMA.replace("default", "longrope"),
                "\"default\", \"linear\", \"dynamic\", \"llama3\" or \"yarn\"",
            ),
            (&LLAMA.replace("default", "linear"), "lacks 'factor'"),
            (&LLAMA.replace("default", "llama3"), "lacks 'factor'"),
            (&LLAMA.replace("5000.0", "0.5"), "a number from 1"),
            (&GPT2.replace("1e-05", "1e-50"), "within the range of f32"),
            (
                &LLAMA.replace(r#""num_key_value_heads":2"#, r#""num_key_value_heads":4"#),
                "a divisor of 6 heads",
            ),
            (&LLAMA.replace(r#""head_dim":8"#, r#""head_dim":7"#), "even"),
        ];
        for (text, expected) in refusals {
            let message = ModelConfig::from_json(text).unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        }
    }
}
