//! Which optimizers there are, and their settings.

use trireme_tensor::{Precision, Shape, StateDType};

/// Settings of AdamW (Loshchilov, Hutter 2019), and of Adam and LAMB, which have the same.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWSettings {
    /// Decay rate of the first moment.
    pub beta1: f32,
    /// Decay rate of the second moment.
    pub beta2: f32,
    /// Share of the first moment in the update of AdamW and Adam, the gradient having the rest (`nu1` of QHAdam: Ma, Yarats
    /// 2019); 1 for the others.
    pub nu: f32,
    /// Added to the root of the second moment.
    pub epsilon: f32,
}

/// Settings of stochastic gradient descent with momentum.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SgdSettings {
    /// Decay rate of the velocity; 0 for none.
    pub momentum: f32,
    /// Nesterov's variant.
    pub nesterov: bool,
}

/// Settings of Lion (Chen et al. 2023).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LionSettings {
    /// Share of the momentum in the update.
    pub beta1: f32,
    /// Decay rate of the momentum.
    pub beta2: f32,
}

/// Settings of Adafactor (Shazeer, Stern 2018).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdafactorSettings {
    /// The new square has the share `step^beta2_decay` in the second moment; negative.
    pub beta2_decay: f32,
    /// The largest root mean square of an update; larger ones are scaled down.
    pub clip_threshold: f32,
    /// Learning rates are parts of the parameter's root mean square, and at most `1 / sqrt(step)` of it.
    pub relative_step: bool,
}

/// Settings of LARS (You et al. 2017).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LarsSettings {
    /// Decay rate of the velocity.
    pub momentum: f32,
    /// The length of an update as a part of the parameter's, before the learning rate.
    pub trust_coefficient: f32,
}

/// How an orthogonal update of Muon is scaled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MuonScale {
    /// By `sqrt(max(1, rows / cols))` (Jordan 2024).
    Original,
    /// By `0.2 sqrt(max(rows, cols))`: updates are as large as AdamW's, and so is the learning rate that fits (Liu et al.,
    /// "Muon is scalable for LLM training", 2025).
    MatchAdamW,
}

impl MuonScale {
    /// The factor for a matrix.
    pub(crate) fn factor(self, shape: Shape) -> f64 {
        let (rows, cols) = (shape.rows() as f64, shape.cols() as f64);
        match self {
            MuonScale::Original => (rows / cols).max(1.0).sqrt(),
            MuonScale::MatchAdamW => 0.2 * rows.max(cols).sqrt(),
        }
    }
}

/// Settings of Muon (Jordan 2024): for [matrices](trireme_tensor::ParameterClass::Matrix) of two dims; AdamW updates all
/// other parameters.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MuonSettings {
    /// Decay rate of the momentum, a mean of gradients.
    pub momentum: f32,
    /// Mix the gradient in once more.
    pub nesterov: bool,
    /// Rounds of the Newton-Schulz iteration.
    pub num_iterations: usize,
    /// How updates are scaled.
    pub scale: MuonScale,
    /// What the iteration's products are made of.
    pub precision: Precision,
    /// AdamW's settings.
    pub adamw: AdamWSettings,
    /// AdamW's learning rate, as a part of that of Muon.
    pub adamw_lr_scale: f32,
}

/// When the second moment is updated, by optimizers that exchange momentum the rest of the time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VarianceSchedule {
    /// In the first steps, then never again: 1-bit Adam (Tang et al. 2021).
    Warmup {
        /// Steps with updates.
        num_steps: u64,
    },
    /// In every step at first, in every second after `num_updates` updates, then in every fourth, and so on: 0/1 Adam (Lu et
    /// al. 2022, section 5).
    Doubling {
        /// Updates after which the interval doubles.
        num_updates: u64,
    },
}

impl VarianceSchedule {
    /// Whether step `step`, counted from 1, updates the second moment, and how many steps have done so, this one included.
    pub(crate) fn at(self, step: u64) -> (bool, u64) {
        match self {
            VarianceSchedule::Warmup { num_steps } => (step <= num_steps, step.min(num_steps)),
            VarianceSchedule::Doubling { num_updates } => {
                let (mut first, mut interval, mut count) = (1, 1, 0);
                while let Some(next) = num_updates.checked_mul(interval).and_then(|n| n.checked_add(first))
                    && next <= step
                {
                    (first, interval, count) = (next, 2 * interval, count + num_updates);
                }
                let since = step - first;
                (since.is_multiple_of(interval), count + since / interval + 1)
            }
        }
    }
}

/// Which optimizer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum OptimizerKind {
    /// AdamW: two values of state a parameter.
    AdamW(AdamWSettings),
    /// Adam (Kingma, Ba 2015), with weight decay in the gradient: two values of state a parameter.
    Adam(AdamWSettings),
    /// SGD with momentum: one value of state a parameter.
    Sgd(SgdSettings),
    /// Lion: one value of state a parameter.
    Lion(LionSettings),
    /// Adafactor: a value of state for each row and column of a matrix, and for each element of a vector.
    Adafactor(AdafactorSettings),
    /// LAMB (You et al. 2020): two values of state a parameter.
    Lamb(AdamWSettings),
    /// LARS: one value of state a parameter.
    Lars(LarsSettings),
    /// Muon: one value of state an element of a hidden matrix, two of others.
    Muon(MuonSettings),
    /// Adam with decoupled weight decay whose second moment is updated now and then: 1-bit Adam and 0/1 Adam. Two values of
    /// state a parameter.
    CompressedAdam(AdamWSettings, VarianceSchedule),
}

/// What an [`Optimizer`](crate::Optimizer) is.
#[derive(Debug, Clone, PartialEq)]
pub struct OptimizerOptions {
    /// Which one.
    pub kind: OptimizerKind,
    /// Weight decay of matrices.
    pub weight_decay: f32,
    /// Whether it extends to vectors.
    pub decay_norms_and_biases: bool,
    /// Parameters with settings of their own; of several groups that match, the first counts.
    pub groups: Vec<crate::ParameterGroup>,
    /// What state is kept in. Units of fewer than [`OptimizerOptions::INT8_ELEMENTS_MIN`] elements keep f32 instead of 8 bits.
    pub state_dtype: StateDType,
    /// How far an update moves biases that [balance](trireme_tensor::ParameterClass::Balance) loads, whatever the kind.
    pub balance_rate: f32,
}

impl OptimizerOptions {
    /// Whether the parameter of this name stays as it is.
    pub fn is_frozen(&self, name: &str) -> bool {
        self.group_of(name).is_some_and(|group| group.frozen)
    }

    /// The first group whose pattern fits the name of a parameter.
    pub(crate) fn group_of(&self, name: &str) -> Option<&crate::ParameterGroup> {
        self.groups.iter().find(|group| group.matches(name))
    }

    /// How far an update moves biases that balance loads, unless something else is asked for (DeepSeek-AI, "DeepSeek-V3 technical report", 2024,
    /// section 4.2).
    pub const BALANCE_RATE: f32 = 1e-3;

    /// Smaller units have blocks too short to save bytes.
    pub const INT8_ELEMENTS_MIN: usize = 1 << 16;

    /// An optimizer without weight decay and groups, with states in f32.
    pub fn new(kind: OptimizerKind) -> Self {
        OptimizerOptions {
            kind,
            weight_decay: 0.0,
            decay_norms_and_biases: false,
            groups: Vec::new(),
            state_dtype: StateDType::F32,
            balance_rate: Self::BALANCE_RATE,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variance_schedules_count_their_updates() {
        let updates = |schedule: VarianceSchedule, steps: u64| -> Vec<u64> {
            let mut count = 0;
            let mut updates = Vec::new();
            for step in 1..=steps {
                let (is_update, found) = schedule.at(step);
                if is_update {
                    count += 1;
                    updates.push(step);
                }
                assert_eq!(found, count, "step {step}");
            }
            updates
        };
        assert_eq!(updates(VarianceSchedule::Warmup { num_steps: 3 }, 9), [1, 2, 3]);
        assert_eq!(updates(VarianceSchedule::Doubling { num_updates: 2 }, 20), [1, 2, 3, 5, 7, 11, 15]);
        assert_eq!(VarianceSchedule::Doubling { num_updates: u64::MAX }.at(u64::MAX), (true, u64::MAX));
    }
}
