//! Rotary positions.

use super::reader::{Reader, wrong};
use crate::error::Result;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::f64::consts::TAU;

/// Rotary positions (Su et al., "RoFormer", 2021): the angle per position of pair `i` of a head is `theta^(-2 i / head_dim)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// How frequencies are scaled for sequences longer than in pretraining, if they are.
    pub scaling: Option<RopeScaling>,
}

/// How frequencies are scaled. Serializes to the JSON of a `config.json`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(tag = "rope_type", rename_all = "lowercase")]
pub enum RopeScaling {
    /// Divides all frequencies (Chen et al., "Extending context window of large language models via position interpolation", 2023).
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Lowers the frequencies for sequences longer than `max_position_embeddings`: the longer the sequence, the lower the frequencies
    /// ([`DynamicScaling`](trireme_tensor::tape::DynamicScaling)).
    Dynamic {
        /// Ratio of the longest sequence to `max_position_embeddings`.
        factor: f64,
    },
    /// Scaling of llama 3.
    Llama3(Llama3Scaling),
    /// YaRN.
    Yarn(YarnScaling),
}

/// Frequency scaling of llama 3 (Grattafiori et al., "The Llama 3 herd of models", 2024). Low frequencies are divided by a factor, high
/// frequencies stay unchanged, and the factor is interpolated between them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Llama3Scaling {
    /// Divisor of low frequencies.
    pub factor: f64,
    /// Frequencies with fewer periods than this in `original_positions` are low.
    #[serde(rename = "low_freq_factor")]
    pub low_frequency_factor: f64,
    /// Frequencies with more periods than this are high.
    #[serde(rename = "high_freq_factor")]
    pub high_frequency_factor: f64,
    /// Number of positions in pretraining.
    #[serde(rename = "original_max_position_embeddings")]
    pub original_positions: usize,
}

/// Frequency scaling of YaRN (Peng et al., "YaRN: efficient context window extension of large language models", 2023). Low frequencies are
/// divided by a factor, high frequencies stay unchanged, with a linear ramp over the pairs between them. Queries and keys are also scaled
/// up.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct YarnScaling {
    /// Divisor of low frequencies.
    pub factor: f64,
    /// Frequencies with at least this many periods in `original_positions` are high.
    pub beta_fast: f64,
    /// Frequencies with fewer periods than this are low.
    pub beta_slow: f64,
    /// Weight `m` in the scale `0.1 m ln(factor) + 1` of queries and keys. It is used only together with `mscale_all_dim`; otherwise the
    /// weight is 1.
    pub mscale: Option<f64>,
    /// Weight `m` in the divisor `0.1 m ln(factor) + 1` of the scale of queries and keys. Latent attention multiplies scores by the square
    /// of this divisor.
    pub mscale_all_dim: Option<f64>,
    /// Scale of queries and keys, instead of the computed one.
    pub attention_factor: Option<f64>,
    /// Whether the ramp starts and ends at whole pairs.
    #[serde(rename = "truncate")]
    pub truncates: bool,
    /// Number of positions in pretraining.
    #[serde(rename = "original_max_position_embeddings")]
    pub original_positions: usize,
}

impl Rope {
    /// Returns the angles per position of the pairs of a head.
    pub(crate) fn frequencies(&self, head_dim: usize) -> Vec<f64> {
        let frequency = |pair: usize| self.theta.powf(-2.0 * pair as f64 / head_dim as f64);
        let scaled = |pair: usize| match self.scaling {
            None | Some(RopeScaling::Dynamic { .. }) => frequency(pair),
            Some(RopeScaling::Linear { factor }) => frequency(pair) / factor,
            Some(RopeScaling::Llama3(scaling)) => scaling.apply(frequency(pair)),
            Some(RopeScaling::Yarn(scaling)) => {
                scaling.apply(frequency(pair), scaling.unscaled_fraction(pair, head_dim, self.theta))
            }
        };
        (0..head_dim / 2).map(scaled).collect()
    }

    /// Returns the factor by which queries and keys are multiplied when they are rotated.
    pub(crate) fn amplitude(&self) -> f32 {
        match self.scaling {
            Some(RopeScaling::Yarn(scaling)) => scaling.amplitude() as f32,
            _ => 1.0,
        }
    }
}

impl Llama3Scaling {
    fn apply(&self, frequency: f64) -> f64 {
        let Llama3Scaling { factor, low_frequency_factor: low, high_frequency_factor: high, .. } = *self;
        let num_waves = self.original_positions as f64 * frequency / TAU;
        let kept = ((num_waves - low) / (high - low)).clamp(0.0, 1.0);
        (1.0 - kept) * frequency / factor + kept * frequency
    }
}

impl YarnScaling {
    fn apply(&self, frequency: f64, kept: f64) -> f64 {
        (1.0 - kept) * frequency / self.factor + kept * frequency
    }

    fn unscaled_fraction(&self, pair: usize, head_dim: usize, theta: f64) -> f64 {
        // The pair that has this many periods in the positions of pretraining.
        let pair_of = |turns: f64| {
            head_dim as f64 * (self.original_positions as f64 / (turns * TAU)).ln() / (2.0 * theta.ln())
        };
        let (mut low, mut high) = (pair_of(self.beta_fast), pair_of(self.beta_slow));
        if self.truncates {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, mut high) = (low.max(0.0), high.min(head_dim as f64 - 1.0));
        if low == high {
            high += 1e-3;
        }
        1.0 - ((pair as f64 - low) / (high - low)).clamp(0.0, 1.0)
    }

    fn attention_scale(&self, mscale: f64) -> f64 {
        if self.factor <= 1.0 { 1.0 } else { 0.1 * mscale * self.factor.ln() + 1.0 }
    }

    fn amplitude(&self) -> f64 {
        match (self.attention_factor, self.mscale, self.mscale_all_dim) {
            (Some(factor), ..) => factor,
            (None, Some(mscale), Some(all)) => self.attention_scale(mscale) / self.attention_scale(all),
            _ => self.attention_scale(1.0),
        }
    }

    /// Returns the factor by which latent attention multiplies its scores.
    pub(crate) fn latent_score_factor(&self) -> f64 {
        self.mscale_all_dim.map_or(1.0, |mscale| self.attention_scale(mscale).powi(2))
    }
}

/// Reads rotary positions. transformers 5 writes `rope_parameters`; earlier versions write `rope_theta` and `rope_scaling`.
pub(crate) fn read_rope(reader: &Reader<'_>, default_theta: f64) -> Result<Rope> {
    // If both keys are given, rope_scaling takes precedence, as in transformers.
    let is_given = |key: &&str| reader.get(key).is_some_and(|value| *value != json!({}));
    let Some(key) = ["rope_scaling", "rope_parameters"].into_iter().find(is_given) else {
        return read_parameters(reader, &Map::new(), default_theta);
    };
    let Some(Value::Object(map)) = reader.get(key) else {
        return Err(wrong(key, &reader.map[key], "an object"));
    };
    // Some programs nest the parameters by the attention type of layers.
    let nested: Vec<_> = map.iter().filter(|(_, value)| value.is_object()).collect();
    let Some(((name, first), others)) = nested.split_first() else {
        return read_parameters(reader, map, default_theta);
    };
    let known = ["full_attention", "sliding_attention"];
    if !known.contains(&name.as_str()) || others.iter().any(|(name, _)| !known.contains(&name.as_str())) {
        return Err(wrong(
            key,
            &reader.map[key],
            &format!("parameters, or those of {}", known.join(" and ")),
        ));
    }
    let read = |value: &Value| {
        read_parameters(reader, value.as_object().expect("nested values are objects"), default_theta)
    };
    let rope = read(first)?;
    for (_, other) in others {
        if read(other)? != rope {
            return Err(wrong(key, &reader.map[key], "the same parameters for all types of layers"));
        }
    }
    Ok(rope)
}

/// Reads the parameters in `map`. The base and the number of positions in pretraining may also be keys of `reader`, the config that
/// contains `map`.
fn read_parameters(reader: &Reader<'_>, map: &Map<String, Value>, default_theta: f64) -> Result<Rope> {
    let rope = Reader { map, family: reader.family };
    rope.require("partial_rotary_factor", &["1"])?;
    let theta = match rope.get("rope_theta") {
        Some(_) => rope.number("rope_theta", 1.0)?,
        None => reader.number("rope_theta", default_theta)?,
    };
    let kind = rope.get("rope_type").or_else(|| rope.get("type"));
    // The key of the config takes precedence over the key in `map`, as in transformers.
    let original_positions = || match reader.optional_size("original_max_position_embeddings")? {
        Some(positions) => Ok(positions),
        None => rope.size("original_max_position_embeddings"),
    };
    let needed = |key: &'static str| rope.optional_number(key)?.ok_or_else(|| rope.missing(key));
    let scaling = match kind.map_or(Some("default"), Value::as_str) {
        Some("default") => None,
        Some("linear") => Some(RopeScaling::Linear { factor: needed("factor")? }),
        Some("dynamic") => Some(RopeScaling::Dynamic { factor: needed("factor")? }),
        Some("llama3") => Some(RopeScaling::Llama3(Llama3Scaling {
            factor: needed("factor")?,
            low_frequency_factor: needed("low_freq_factor")?,
            high_frequency_factor: needed("high_freq_factor")?,
            original_positions: original_positions()?,
        })),
        Some("yarn") => Some(RopeScaling::Yarn(YarnScaling {
            factor: needed("factor")?,
            beta_fast: rope.number("beta_fast", 32.0)?,
            beta_slow: rope.number("beta_slow", 1.0)?,
            mscale: rope.optional_number("mscale")?,
            mscale_all_dim: rope.optional_number("mscale_all_dim")?,
            attention_factor: rope.optional_number("attention_factor")?,
            truncates: rope.flag("truncate", true)?,
            original_positions: original_positions()?,
        })),
        _ => {
            let found = kind.unwrap_or(&Value::Null);
            let known = "\"default\", \"linear\", \"dynamic\", \"llama3\" or \"yarn\"";
            return Err(wrong("rope_type", found, known));
        }
    };
    match scaling {
        Some(RopeScaling::Llama3(Llama3Scaling {
            low_frequency_factor: low,
            high_frequency_factor: high,
            ..
        })) if high <= low => {
            Err(wrong("high_freq_factor", &json!(high), &format!("more than low_freq_factor {low}")))
        }
        Some(RopeScaling::Yarn(YarnScaling { beta_fast, beta_slow, .. })) if beta_fast < beta_slow => {
            Err(wrong("beta_fast", &json!(beta_fast), &format!("at least beta_slow {beta_slow}")))
        }
        Some(RopeScaling::Yarn(_)) if theta <= 1.0 => {
            Err(wrong("rope_theta", &json!(theta), "more than 1 with rope_type \"yarn\""))
        }
        Some(scaling) if !scaling.is_representable() => {
            Err(wrong("factor", &json!(scaling.factor()), "a factor that leaves angles and lengths finite"))
        }
        _ => Ok(Rope { theta, scaling }),
    }
}

impl RopeScaling {
    /// Returns the divisor of low frequencies.
    fn factor(self) -> f64 {
        match self {
            RopeScaling::Linear { factor } | RopeScaling::Dynamic { factor } => factor,
            RopeScaling::Llama3(scaling) => scaling.factor,
            RopeScaling::Yarn(scaling) => scaling.factor,
        }
    }

    /// Returns whether the resulting factors are in the range of f32.
    fn is_representable(self) -> bool {
        let scales = match self {
            RopeScaling::Linear { .. } | RopeScaling::Dynamic { .. } | RopeScaling::Llama3(_) => [1.0; 2],
            RopeScaling::Yarn(scaling) => [scaling.amplitude(), scaling.latent_score_factor()],
        };
        let is_normal = |number: f64| (number as f32).is_normal();
        is_normal(1.0 / self.factor()) && scales.into_iter().all(is_normal)
    }

    pub(crate) fn to_json(self) -> Value {
        serde_json::to_value(self).expect("numbers are JSON")
    }
}
