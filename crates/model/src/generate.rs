//! Generation, token by token, with cached keys and values.

use crate::block::Past;
use crate::error::ModelError;
use crate::model::{Model, rotary_table};
use std::sync::Arc;
use trireme_base::{DType, Random};
use trireme_tensor::tape::{KeyValueCache, Recording, RotaryTable};
use trireme_tensor::{Category, Device, ParameterSource, Precision, Tape};

/// How the next token is chosen from logits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// Logits are divided by this; 0 chooses the likeliest token.
    pub temperature: f32,
    /// Only this many of the likeliest tokens remain; 0 keeps all.
    pub top_k: usize,
    /// Only the likeliest tokens that together reach this probability remain; 1 keeps all
    /// (Holtzman et al. 2020, "nucleus sampling").
    pub top_p: f32,
}

impl Sampling {
    /// Chooses a token.
    ///
    /// # Panics
    /// If there are no logits.
    pub fn choose(&self, logits: &[f32], random: &mut Random) -> u32 {
        let mut tokens: Vec<(u32, f32)> = (0..).zip(logits.iter().copied()).collect();
        // The likeliest first; among equals the smaller id, so that the order is total.
        tokens.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        if self.temperature <= 0.0 {
            return tokens[0].0;
        }
        if self.top_k > 0 {
            tokens.truncate(self.top_k);
        }
        let max = tokens[0].1;
        let mut total = 0.0;
        for (_, weight) in &mut tokens {
            *weight = ((*weight - max) / self.temperature).exp();
            total += f64::from(*weight);
        }
        let mut kept = 0.0;
        let mut num_kept = 0;
        for (_, weight) in &tokens {
            kept += f64::from(*weight);
            num_kept += 1;
            if kept >= f64::from(self.top_p) * total {
                break;
            }
        }
        let mut rest = random.next_f64() * kept;
        for &(token, weight) in &tokens[..num_kept] {
            rest -= f64::from(weight);
            if rest < 0.0 {
                return token;
            }
        }
        tokens[num_kept - 1].0
    }
}

/// A sequence being generated.
#[derive(Debug)]
pub struct Generation<'a> {
    model: &'a Model,
    parameters: &'a dyn ParameterSource,
    device: &'a Device,
    rotary: Option<Arc<RotaryTable>>,
    caches: Vec<KeyValueCache>,
    position: usize,
}

impl<'a> Generation<'a> {
    /// Begins a sequence of at most `capacity` tokens.
    pub fn new(
        model: &'a Model,
        parameters: &'a dyn ParameterSource,
        device: &'a Device,
        capacity: usize,
    ) -> Result<Self, ModelError> {
        let config = model.config();
        let kv_cols = config.num_kv_heads * config.head_dim;
        let cache = |_| KeyValueCache::new(device, 1, capacity, kv_cols);
        let caches = (0..config.num_layers).map(cache).collect::<Result<_, _>>()?;
        let rotary = rotary_table(config, capacity, device)?;
        Ok(Generation { model, parameters, device, rotary, caches, position: 0 })
    }

    /// Tokens read so far.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Reads `tokens`; returns the logits for the one that follows.
    ///
    /// # Panics
    /// If there are none, or more than the capacity allows.
    pub fn read(&mut self, tokens: &[u32]) -> Result<Vec<f32>, ModelError> {
        let mut ids = self.device.empty([1, tokens.len()].into(), DType::U32, Category::Activations)?;
        ids.view_mut().u32s().copy_from_slice(tokens);
        let mut x = ids;
        for unit in 0..self.model.num_units() - 1 {
            let mut tape =
                Tape::new(self.device, Recording::Off, Precision::F32).with_first_position(self.position);
            let layer = unit.checked_sub(1);
            let past =
                layer.map(|layer| Past { rotary: self.rotary.as_ref(), cache: &mut self.caches[layer] });
            let input = tape.input(x);
            let output = self.model.forward_after(unit, &mut tape.recorder(self.parameters), input, past)?;
            x = tape.take_value(output.id());
        }
        self.position += tokens.len();
        let mut last = self.device.empty([1, x.shape().cols()].into(), DType::F32, Category::Activations)?;
        last.view_mut().f32s().copy_from_slice(x.view().rows(tokens.len() - 1, 1).f32s());
        let mut tape = Tape::new(self.device, Recording::Off, Precision::F32);
        let input = tape.input(last);
        let logits = self.model.forward_logits(&mut tape.recorder(self.parameters), input)?;
        Ok(tape.take_value(logits.id()).view().f32s().to_vec())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ModelConfig;
    use trireme_base::RandomKey;
    use trireme_tensor::{DeviceOptions, Parameters};

    fn draws(sampling: Sampling) -> Vec<u32> {
        let mut random = Random::new(RandomKey::new(1, "sampling"), 0);
        let logits = [0.0, 2.0, 1.0, -1.0];
        let mut seen: Vec<u32> = (0..300).map(|_| sampling.choose(&logits, &mut random)).collect();
        seen.sort_unstable();
        seen.dedup();
        seen
    }

    #[test]
    fn limits_keep_the_likeliest_tokens() {
        let all = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0 };
        assert_eq!(draws(all), [0, 1, 2, 3]);
        assert_eq!(draws(Sampling { temperature: 0.0, ..all }), [1]);
        assert_eq!(draws(Sampling { top_k: 2, ..all }), [1, 2]);
        // The likeliest has probability 0.64, the two likeliest 0.88 together.
        assert_eq!(draws(Sampling { top_p: 0.6, ..all }), [1]);
        assert_eq!(draws(Sampling { top_p: 0.7, ..all }), [1, 2]);
        assert_eq!(draws(Sampling { temperature: 0.01, ..all }), [1]);
    }

    #[test]
    fn memory_is_that_of_the_positions_used() {
        let text = include_str!("../tests/golden/llama/config.json");
        let mut json: serde_json::Value = serde_json::from_str(text).unwrap();
        json["max_position_embeddings"] = (1 << 24).into();
        let config = ModelConfig::from_json(&json.to_string()).unwrap();
        let device = Device::cpu(DeviceOptions { num_threads: 1, ..DeviceOptions::default() }).unwrap();
        let model = Model::new(config, 8, &device).unwrap();
        let parameters = Parameters::zeros(model.table(), &device, Category::Parameters).unwrap();
        let mut generation = Generation::new(&model, &parameters, &device, 16).unwrap();
        for _ in 0..4 {
            generation.read(&[1, 2, 3, 4]).unwrap();
        }
        assert!(device.memory().total().peak < 1 << 20, "{:?}", device.memory().total());
    }
}
