//! Model configurations, read from a Hugging Face `config.json` into one description for every family.

mod experts;
mod family;
mod reader;
mod rope;

pub use experts::{ExchangeConfig, ExpertsConfig, LatentConfig, RouterScores};
pub use family::Family;
pub(crate) use reader::{Reader, check_size, shortest, wrong};
pub(crate) use rope::read_rope;
pub use rope::{Llama3Scaling, Rope, RopeScaling, YarnScaling};

use crate::error::Result;
use crate::model::Model;
use serde_json::json;
use std::sync::Arc;
use trireme_tensor::tape::{DynamicScaling, RotaryTable};
use trireme_tensor::{Activation, AttentionRule, Device, ParameterTable};

/// The settings that determine a model's parameters and arithmetic.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// The family of the model.
    pub family: Family,
    /// Number of tokens in the vocabulary.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Number of transformer blocks.
    pub num_layers: usize,
    /// Number of query heads.
    pub num_heads: usize,
    /// Number of key-value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Elements of a head of queries or keys.
    pub head_dim: usize,
    /// Sizes of latent attention, if the model uses it.
    pub latent: Option<LatentConfig>,
    /// Width between the two linear layers of a block without experts.
    pub intermediate_size: usize,
    /// Maximum sequence length without `dynamic` scaling of rotary positions (see [`max_positions`](ModelConfig::max_positions)).
    pub max_position_embeddings: usize,
    /// Constant that norms add to variances and mean squares.
    pub norm_epsilon: f32,
    /// Whether the output layer shares the weight of the token embedding.
    pub tie_word_embeddings: bool,
    /// Rotary positions; `None` if positions are learned.
    pub rope: Option<Rope>,
    /// Whether the projections to queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether the projection after attention has a bias.
    pub attention_output_bias: bool,
    /// Whether the feed-forward projections have biases.
    pub mlp_bias: bool,
    /// Activation between the feed-forward projections. The family determines whether it is gated.
    pub activation: Activation,
    /// The layers with a mixture of experts, if the model has any.
    pub experts: Option<ExpertsConfig>,
    /// How attention scores are computed from queries and keys.
    pub attention: AttentionConfig,
    /// Bound of the logits (soft cap).
    pub logit_soft_cap: Option<f32>,
    /// Standard deviation of random initial weights.
    pub initializer_range: f32,
    /// Dropout probability in training, for elements of the embedding and of the values that layers add to the residual stream. Not part of
    /// a `config.json`.
    pub dropout: f32,
}

impl ModelConfig {
    /// Returns the config of a model of `family` without biases, gates or rotary positions. The caller must set its sizes, which are 0.
    pub(crate) fn plain(family: Family) -> Self {
        ModelConfig {
            family,
            vocab_size: 0,
            hidden_size: 0,
            num_layers: 0,
            num_heads: 0,
            num_kv_heads: 0,
            head_dim: 0,
            latent: None,
            intermediate_size: 0,
            max_position_embeddings: 0,
            norm_epsilon: 0.0,
            tie_word_embeddings: false,
            rope: None,
            qkv_bias: false,
            attention_output_bias: false,
            mlp_bias: false,
            activation: Activation::Gelu,
            experts: None,
            attention: AttentionConfig::default(),
            logit_soft_cap: None,
            initializer_range: 0.0,
            dropout: 0.0,
        }
    }
}

/// How attention scores are computed from queries and keys. The default is plain causal attention.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct AttentionConfig {
    /// Factor by which the products of queries and keys are multiplied; `None` for `1 / sqrt(head_dim)`.
    pub scale: Option<f32>,
    /// Whether the factor is divided by the layer number, counted from 1.
    pub scales_by_layer: bool,
    /// Bound of the scores (soft cap).
    pub soft_cap: Option<f32>,
    /// Sliding-window attention, if some layers use it.
    pub sliding: Option<SlidingWindow>,
}

/// Attention to the nearest keys only (Beltagy et al., "Longformer", 2020, section 3.1).
#[derive(Debug, Clone, PartialEq)]
pub struct SlidingWindow {
    /// Number of keys that a query attends to, including its own.
    pub size: usize,
    /// The layers that use the window, counted from 0.
    pub layers: Vec<usize>,
}

impl AttentionConfig {
    pub(crate) fn window(&self, layer: usize) -> Option<usize> {
        let sliding = self.sliding.as_ref()?;
        sliding.layers.contains(&layer).then_some(sliding.size)
    }
}

/// Maximum number of layers. A larger number is treated as a damaged config, because each layer has its own parameter names and
/// descriptions.
const LAYERS_MAX: usize = 4096;

/// Maximum number of positions with scaling. This is also the largest `max_position_embeddings` that is accepted.
const POSITIONS_MAX: usize = 1 << 24;

impl ModelConfig {
    /// Returns descriptions of the settings in which this model computes something different from `other`. Each description has the
    /// setting's name in the `[model]` section of a job's config, if it has one there, and both values. Initialization is not compared.
    pub fn differences(&self, other: &Self) -> Vec<String> {
        // Derived sizes come after the sizes that they are derived from.
        let settings = |config: &Self| {
            let windows = match &config.attention.sliding {
                Some(SlidingWindow { size, layers }) if !layers.is_empty() => {
                    format!("{size} in layers {layers:?}")
                }
                _ => "none".to_owned(),
            };
            // Learned positions have a parameter for each position. The number of rotary positions matters only for dynamic scaling.
            let is_dynamic = |rope: Rope| matches!(rope.scaling, Some(RopeScaling::Dynamic { .. }));
            let depends = config.rope.is_none_or(is_dynamic);
            let positions = depends.then_some(config.max_position_embeddings);
            // Settings of experts that only affect training do not change what a model computes.
            let without_training_settings = |experts: &ExpertsConfig| ExpertsConfig {
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
                        .map(without_training_settings)
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

    /// Checks that the sizes are consistent.
    ///
    /// # Errors
    /// [`WrongValue`](crate::ModelError::WrongValue) for the first inconsistent value.
    pub fn check(&self) -> Result<()> {
        let (heads, layers) = (self.num_heads, self.num_layers);
        check_size(
            "num_hidden_layers",
            layers,
            layers <= LAYERS_MAX,
            format!("at most {LAYERS_MAX} layers"),
        )?;
        check_size(
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
            check_size(key, dim, dim.is_multiple_of(2), "an even number, for rotary pairs".into())?;
            let is_dynamic = self.max_positions() > self.max_position_embeddings;
            check_size(key, dim, dim > 2 || !is_dynamic, "more than 2 with rope_type \"dynamic\"".into())?;
        } else {
            let hidden = self.hidden_size;
            check_size(
                "n_head",
                heads,
                hidden.is_multiple_of(heads),
                format!("a divisor of n_embd {hidden}"),
            )?;
        }
        Ok(())
    }

    /// Returns the maximum sequence length in tokens: `max_position_embeddings`, multiplied by the scaling factor if `rope_type` is
    /// `dynamic`.
    pub fn max_positions(&self) -> usize {
        match self.rope.and_then(|rope| rope.scaling) {
            Some(RopeScaling::Dynamic { factor }) if factor > 1.0 => {
                (self.max_position_embeddings as f64 * factor).min(POSITIONS_MAX as f64) as usize
            }
            _ => self.max_position_embeddings,
        }
    }

    /// Returns the number of rotated elements of a head, and the config key that sets it.
    fn rotary_dim(&self) -> (&'static str, usize) {
        self.latent.map_or(("head_dim", self.head_dim), |latent| ("qk_rope_head_dim", latent.rotary_dim))
    }

    pub(crate) fn experts_of(&self, layer: usize) -> Option<&ExpertsConfig> {
        self.experts.as_ref().filter(|experts| experts.layers.contains(&layer))
    }

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

    /// Builds the model for sequences of at most `seq_len_max` tokens. A [`KvCache`](crate::KvCache) has its own limit.
    ///
    /// # Errors
    /// If sizes are inconsistent, or if the memory for tables of positions cannot be allocated.
    pub fn build(&self, seq_len_max: usize, device: &Device) -> Result<Model> {
        self.build_into(ParameterTable::default(), seq_len_max, device)
    }

    /// Like [`build`](ModelConfig::build), but adds the parameters to `table`, which must be empty. The table determines which part of the
    /// model the rank holds.
    ///
    /// # Errors
    /// As [`build`](ModelConfig::build).
    ///
    /// # Panics
    /// If the ranks of the tensor axis [cannot split](ParameterTable::check_tensor_degree) the model.
    pub fn build_into(&self, table: ParameterTable, seq_len_max: usize, device: &Device) -> Result<Model> {
        self.check()?;
        let rotary_table = |rope: &Rope| {
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
        let rotary = self.rope.as_ref().map(rotary_table).transpose()?;
        Ok((self.family.build)(self, rotary.as_ref(), table))
    }
}
