//! Hugging Face `config.json`, read into one description for every architecture.

use crate::error::ModelError;
use serde_json::{Map, Value, json};

/// Families of models.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Architecture {
    /// Learned positions, layer normalisation, GELU, biases (Radford et al. 2019).
    Gpt2,
    /// Rotary positions, RMS normalisation, SwiGLU, grouped-query attention (Touvron et al. 2023).
    Llama,
}

impl Architecture {
    /// `model_type` in `config.json`.
    pub fn name(self) -> &'static str {
        match self {
            Architecture::Gpt2 => "gpt2",
            Architecture::Llama => "llama",
        }
    }
}

/// Everything that determines a model's parameters and arithmetic.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Family.
    pub architecture: Architecture,
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
    /// Elements of a head.
    pub head_dim: usize,
    /// Width between the two linear layers of a block.
    pub intermediate_size: usize,
    /// Longest sequence.
    pub max_position_embeddings: usize,
    /// Added to variances and mean squares.
    pub norm_epsilon: f32,
    /// Whether the output layer is the token embedding.
    pub tie_word_embeddings: bool,
    /// Base of the rotary frequencies (llama).
    pub rope_theta: f64,
    /// Biases in the attention's projections (llama; gpt2 always has them).
    pub attention_bias: bool,
    /// Biases in the feed-forward projections (llama; gpt2 always has them).
    pub mlp_bias: bool,
    /// Standard deviation of random initial weights.
    pub initializer_range: f32,
}

impl ModelConfig {
    /// The settings in which this model computes something else than `other`: each with both values, named as `[model]` names
    /// them. How weights are initialized is no such setting.
    pub fn differences(&self, other: &Self) -> Vec<String> {
        // Derived sizes follow what they are derived from.
        let settings = |config: &Self| {
            let positions =
                (config.architecture == Architecture::Gpt2).then_some(config.max_position_embeddings);
            [
                ("architecture", config.architecture.name().to_owned()),
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
                ("rope_theta", config.rope_theta.to_string()),
                ("attention_bias", config.attention_bias.to_string()),
                ("mlp_bias", config.mlp_bias.to_string()),
            ]
        };
        let pairs = settings(self).into_iter().zip(settings(other));
        let differing = pairs.filter(|((_, own), (_, other))| own != other);
        differing.map(|((name, own), (_, other))| format!("{name} {own} instead of {other}")).collect()
    }
}

/// Sizes beyond which a config is taken for damaged rather than large.
const SIZE_MAX: u64 = 1 << 24;

/// As [`SIZE_MAX`], for blocks: each has names and descriptions of its own.
const LAYERS_MAX: usize = 4096;

/// A `config.json` being read.
struct Reader<'a> {
    map: &'a Map<String, Value>,
    architecture: Architecture,
}

impl Reader<'_> {
    fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    fn size(&self, key: &'static str) -> Result<usize, ModelError> {
        let missing = || ModelError::MissingKey { key, architecture: self.architecture.name().to_owned() };
        self.optional_size(key)?.ok_or_else(missing)
    }

    fn optional_size(&self, key: &'static str) -> Result<Option<usize>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64() {
            Some(size @ 1..=SIZE_MAX) => Ok(Some(size as usize)),
            _ => Err(wrong(key, value, "a whole number from 1 to 16777216")),
        }
    }

    fn number(&self, key: &'static str, default: f64) -> Result<f64, ModelError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        match value.as_f64() {
            Some(number) if number > 0.0 && number.is_finite() => Ok(number),
            _ => Err(wrong(key, value, "a positive number")),
        }
    }

    fn flag(&self, key: &'static str, default: bool) -> Result<bool, ModelError> {
        let Some(value) = self.get(key) else { return Ok(default) };
        value.as_bool().ok_or_else(|| wrong(key, value, "true or false"))
    }

    /// Refuses a key whose value asks for arithmetic that is not built here.
    fn require(&self, key: &'static str, accepted: &[Value]) -> Result<(), ModelError> {
        let Some(value) = self.get(key) else { return Ok(()) };
        if accepted.contains(value) {
            return Ok(());
        }
        let names: Vec<String> = accepted.iter().map(Value::to_string).collect();
        Err(wrong(key, value, &names.join(" or ")))
    }
}

fn wrong(key: &str, value: &Value, expected: &str) -> ModelError {
    ModelError::WrongValue { key: key.to_owned(), found: value.to_string(), expected: expected.to_owned() }
}

impl ModelConfig {
    /// Reads the text of a `config.json` whose `model_type` is `gpt2` or `llama`.
    pub fn from_json(text: &str) -> Result<Self, ModelError> {
        let value: Value = serde_json::from_str(text).map_err(ModelError::NotJson)?;
        let Value::Object(map) = &value else { return Err(wrong("config.json", &value, "an object")) };
        let architecture = match map.get("model_type").and_then(Value::as_str) {
            Some("gpt2") => Architecture::Gpt2,
            Some("llama") => Architecture::Llama,
            _ => {
                let found = map.get("model_type").unwrap_or(&Value::Null);
                return Err(wrong("model_type", found, "\"gpt2\" or \"llama\""));
            }
        };
        let reader = Reader { map, architecture };
        let config = match architecture {
            Architecture::Gpt2 => read_gpt2(&reader)?,
            Architecture::Llama => read_llama(&reader)?,
        };
        config.check()?;
        Ok(config)
    }

    /// What a `config.json` asks for and training leaves out, one sentence each: to be shown to the user.
    pub fn notices(text: &str) -> Vec<String> {
        let map: Map<String, Value> = serde_json::from_str(text).unwrap_or_default();
        ["resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout"]
            .into_iter()
            .filter(|key| map.get(*key).and_then(Value::as_f64).is_some_and(|rate| rate > 0.0))
            .map(|key| format!("config.json sets {key} = {}; training runs without dropout", map[key]))
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
        if self.architecture == Architecture::Llama {
            fits(
                "head_dim",
                self.head_dim,
                self.head_dim.is_multiple_of(2),
                "an even number, for rotary pairs".into(),
            )?;
        } else {
            let hidden = self.hidden_size;
            fits("n_head", heads, hidden.is_multiple_of(heads), format!("a divisor of n_embd {hidden}"))?;
        }
        Ok(())
    }

    /// The `config.json` that reads back as this model.
    pub fn to_json(&self) -> Value {
        match self.architecture {
            Architecture::Gpt2 => json!({
                "architectures": ["GPT2LMHeadModel"],
                "model_type": "gpt2",
                "vocab_size": self.vocab_size,
                "n_positions": self.max_position_embeddings,
                "n_embd": self.hidden_size,
                "n_layer": self.num_layers,
                "n_head": self.num_heads,
                "n_inner": self.intermediate_size,
                "activation_function": "gelu_new",
                "layer_norm_epsilon": shortest(self.norm_epsilon),
                "initializer_range": shortest(self.initializer_range),
                "resid_pdrop": 0.0,
                "embd_pdrop": 0.0,
                "attn_pdrop": 0.0,
                "tie_word_embeddings": self.tie_word_embeddings,
                "dtype": "float32",
            }),
            Architecture::Llama => json!({
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "vocab_size": self.vocab_size,
                "hidden_size": self.hidden_size,
                "intermediate_size": self.intermediate_size,
                "num_hidden_layers": self.num_layers,
                "num_attention_heads": self.num_heads,
                "num_key_value_heads": self.num_kv_heads,
                "head_dim": self.head_dim,
                "hidden_act": "silu",
                "max_position_embeddings": self.max_position_embeddings,
                "rms_norm_eps": shortest(self.norm_epsilon),
                "rope_theta": self.rope_theta,
                "attention_bias": self.attention_bias,
                "mlp_bias": self.mlp_bias,
                "initializer_range": shortest(self.initializer_range),
                "tie_word_embeddings": self.tie_word_embeddings,
                "dtype": "float32",
            }),
        }
    }
}

/// The f64 whose shortest text is that of `x`: 1e-5 instead of 9.99999974e-6.
fn shortest(x: f32) -> f64 {
    x.to_string().parse().expect("a printed number parses")
}

fn read_gpt2(reader: &Reader<'_>) -> Result<ModelConfig, ModelError> {
    reader.require("activation_function", &[json!("gelu_new"), json!("gelu_pytorch_tanh")])?;
    reader.require("scale_attn_weights", &[json!(true)])?;
    reader.require("scale_attn_by_inverse_layer_idx", &[json!(false)])?;
    reader.require("reorder_and_upcast_attn", &[json!(false)])?;
    reader.require("add_cross_attention", &[json!(false)])?;
    let (hidden_size, num_heads) = (reader.size("n_embd")?, reader.size("n_head")?);
    Ok(ModelConfig {
        architecture: Architecture::Gpt2,
        vocab_size: reader.size("vocab_size")?,
        hidden_size,
        num_layers: reader.size("n_layer")?,
        num_heads,
        num_kv_heads: num_heads,
        head_dim: hidden_size / num_heads,
        intermediate_size: reader.optional_size("n_inner")?.unwrap_or(4 * hidden_size),
        max_position_embeddings: reader.size("n_positions")?,
        norm_epsilon: reader.number("layer_norm_epsilon", 1e-5)? as f32,
        tie_word_embeddings: reader.flag("tie_word_embeddings", true)?,
        rope_theta: 10_000.0,
        attention_bias: true,
        mlp_bias: true,
        initializer_range: reader.number("initializer_range", 0.02)? as f32,
    })
}

fn read_llama(reader: &Reader<'_>) -> Result<ModelConfig, ModelError> {
    reader.require("hidden_act", &[json!("silu")])?;
    // transformers 5 writes rope_parameters; earlier versions rope_theta and rope_scaling.
    let rope = reader.get("rope_parameters").or_else(|| reader.get("rope_scaling"));
    let kind = rope.and_then(|rope| rope.get("rope_type").or_else(|| rope.get("type")));
    if let Some(kind) = kind.filter(|kind| *kind != &json!("default")) {
        return Err(wrong("rope_type", kind, "\"default\" (rotary scaling is not built in)"));
    }
    let theta = rope.and_then(|rope| rope.get("rope_theta")).and_then(Value::as_f64);
    let (hidden_size, num_heads) = (reader.size("hidden_size")?, reader.size("num_attention_heads")?);
    Ok(ModelConfig {
        architecture: Architecture::Llama,
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
        rope_theta: match theta {
            Some(theta) if theta > 0.0 && theta.is_finite() => theta,
            Some(theta) => return Err(wrong("rope_theta", &json!(theta), "a positive number")),
            None => reader.number("rope_theta", 10_000.0)?,
        },
        attention_bias: reader.flag("attention_bias", false)?,
        mlp_bias: reader.flag("mlp_bias", false)?,
        initializer_range: reader.number("initializer_range", 0.02)? as f32,
    })
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
        assert_eq!((llama.rope_theta, llama.num_kv_heads, llama.tie_word_embeddings), (5000.0, 2, false));
        assert_eq!(ModelConfig::notices(GPT2).len(), 1);
        assert!(ModelConfig::notices(LLAMA).is_empty());
    }

    #[test]
    fn refusals_name_the_key_and_what_is_expected() {
        let refusals = [
            ("{", "not valid JSON"),
            (r#"{"model_type":"bert"}"#, "\"gpt2\" or \"llama\""),
            (r#"{"model_type":"gpt2"}"#, "lacks 'n_embd'"),
            (&GPT2.replace("48", "50"), "a divisor of n_embd 50"),
            (&GPT2.replace("48", "-1"), "whole number"),
            (&GPT2.replace("48", "99999999999"), "16777216"),
            (&GPT2.replace(r#""n_layer":2"#, r#""n_layer":5000"#), "at most 4096 layers"),
            (&LLAMA.replace("default", "llama3"), "rotary scaling"),
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
