//! Generation, token by token, with cached keys and values.

use crate::bundle::{Batch, Bundle};
use crate::error::ModelError;
use crate::model::Model;
use crate::past::Past;
use crate::tokens::{LOGITS, TOKENS};
use crate::unit::UnitPass;
use trireme_base::{DType, Random};
use trireme_tensor::tape::Recording;
use trireme_tensor::{Category, Device, DeviceError, ParameterSource, Precision, Tape, Tensor};

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
    past: Past,
    position: usize,
}

impl<'a> Generation<'a> {
    /// Begins a sequence of at most `capacity` tokens, of a model that reads tokens and whose last unit makes logits of a batch
    /// without targets.
    pub fn new(
        model: &'a Model,
        parameters: &'a dyn ParameterSource,
        device: &'a Device,
        capacity: usize,
    ) -> Self {
        Generation { model, parameters, device, past: Past::new(device, capacity), position: 0 }
    }

    /// Tokens read so far.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Reads `tokens`; returns the logits for the one that follows.
    ///
    /// # Errors
    /// If there is no memory for them.
    ///
    /// # Panics
    /// If there are none, or more than the capacity allows.
    pub fn read(&mut self, tokens: &[u32]) -> Result<Vec<f32>, ModelError> {
        let mut ids = self.device.empty([1, tokens.len()].into(), DType::U32, Category::Activations)?;
        ids.view_mut().u32s().copy_from_slice(tokens);
        let mut batch: Batch = [(TOKENS, ids)].into_iter().collect();
        let mut x = Bundle::new();
        self.past.begin();
        for unit in 0..self.model.num_units() {
            if unit + 1 == self.model.num_units() {
                // Only the last position is continued.
                x.values_mut().try_for_each(|tensor| self.keep_last_row(tensor))?;
            }
            let tape =
                Tape::new(self.device, Recording::Off, Precision::F32).with_first_position(self.position);
            let past = Some(&mut self.past);
            let unit = self.model.unit(unit);
            (_, x) = UnitPass::forward_after(unit, tape, self.parameters, x, &mut batch, past)?;
        }
        self.position += tokens.len();
        Ok(x.get(LOGITS).expect("the model makes logits").view().f32s().to_vec())
    }

    fn keep_last_row(&self, tensor: &mut Tensor) -> Result<(), DeviceError> {
        let shape = tensor.shape();
        let mut last = self.device.empty([1, 1, shape.cols()].into(), DType::F32, Category::Activations)?;
        last.view_mut().f32s().copy_from_slice(tensor.view().rows(shape.rows() - 1, 1).f32s());
        *tensor = last;
        Ok(())
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
        let model = config.build(8, &device).unwrap();
        let parameters = Parameters::zeros(model.table(), &device, Category::Parameters).unwrap();
        let mut generation = Generation::new(&model, &parameters, &device, 16);
        for _ in 0..4 {
            generation.read(&[1, 2, 3, 4]).unwrap();
        }
        assert!(device.memory().total().peak < 1 << 20, "{:?}", device.memory().total());
    }
}
