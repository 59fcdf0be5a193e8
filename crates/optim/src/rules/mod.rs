//! Optimizers and their elementwise update rules.
//!
//! To add an elementwise optimizer, implement [`Rule`] in a new file and add its name, settings and constructor to [`OptimizerName`]. If no
//! [`Update`](trireme_tensor::updates::Update) fits, add one to `trireme_tensor::updates`.
//!
//! A setting is a line in `settings.rs`, which makes it a key of `[optimizer]` with its default, range and documentation. An optimizer that
//! needs full matrices, like Muon, is a variant of `UnitUpdate` (`optimizer.rs`) in place of a `Rule`. `tests/optim/golden.rs` compares
//! each optimizer with values of another implementation.

mod adafactor;
mod adam;
mod lamb;
mod lars;
mod lion;
mod rule;
mod sgd;
mod sign;

use crate::muon;
use crate::settings::OptimizerSettings;
use adafactor::UnfactoredAdafactor;
use adam::{Adam, AdamW, VarianceSchedule};
use lamb::Lamb;
use lars::Lars;
use lion::Lion;
use sgd::Sgd;

pub(crate) use adafactor::{adafactor_scale, adafactor_step};
pub(crate) use adam::CompressedAdam;
pub(crate) use rule::{Rule, StateSpec};
pub(crate) use sign::Sign;

trireme_base::named! {
    /// The optimizers.
    pub enum OptimizerName {
        /// AdamW (Loshchilov, Hutter 2019), with two state values per parameter element.
        AdamW = "adamw",
        /// Adam (Kingma, Ba 2015) with weight decay in the gradient, and with two state values per parameter element.
        Adam = "adam",
        /// SGD with momentum, with one state value per parameter element.
        Sgd = "sgd",
        /// Lion (Chen et al. 2023), with one state value per parameter element.
        Lion = "lion",
        /// Adafactor (Shazeer, Stern 2018), with one state value for each row and column of a matrix, and for each element of a vector.
        Adafactor = "adafactor",
        /// LAMB (You et al. 2020), with two state values per parameter element.
        Lamb = "lamb",
        /// LARS (You et al. 2017), with one state value per parameter element.
        Lars = "lars",
        /// Muon (Jordan 2024) for [matrices](trireme_tensor::ParameterClass::Matrix) of two dims, with one state value per element; AdamW
        /// for all other parameters, with two.
        Muon = "muon",
        /// 1-bit Adam (Tang et al. 2021): Adam with decoupled weight decay whose second moment is frozen after the first steps. Two state
        /// values per parameter element.
        OneBitAdam = "one_bit_adam",
        /// 0/1 Adam (Lu et al. 2022): 1-bit Adam whose second moment is updated at growing intervals.
        ZeroOneAdam = "zero_one_adam",
    }
}

impl OptimizerName {
    /// Returns the names of the [settings](OptimizerSettings) that this optimizer uses.
    pub fn settings(self) -> &'static [&'static str] {
        match self {
            OptimizerName::AdamW | OptimizerName::Adam => &["beta1", "beta2", "nu", "eps"],
            OptimizerName::Sgd => &["momentum", "nesterov"],
            OptimizerName::Lion => &["beta1", "beta2"],
            OptimizerName::Adafactor => &["beta2_decay", "clip_threshold", "relative_step"],
            OptimizerName::Lamb => &["beta1", "beta2", "eps"],
            OptimizerName::Lars => &["momentum", "trust_coefficient"],
            OptimizerName::Muon => muon::SETTINGS,
            OptimizerName::OneBitAdam => &["beta1", "beta2", "eps", "freeze_step"],
            OptimizerName::ZeroOneAdam => &["beta1", "beta2", "eps", "var_update_scaler"],
        }
    }

    /// Returns the rule for all parameters, except for the matrices that Muon orthogonalizes or Adafactor factors.
    ///
    /// # Panics
    /// If 1-bit Adam never updates its second moment, because then no parameter would change.
    pub(crate) fn rule(self, settings: OptimizerSettings) -> Box<dyn Rule> {
        match self {
            OptimizerName::AdamW => Box::new(AdamW { settings, lr_scale: 1.0 }),
            OptimizerName::Adam => Box::new(Adam(settings)),
            OptimizerName::Sgd => Box::new(Sgd(settings)),
            OptimizerName::Lion => Box::new(Lion(settings)),
            OptimizerName::Adafactor => Box::new(UnfactoredAdafactor(settings)),
            OptimizerName::Lamb => Box::new(Lamb(settings)),
            OptimizerName::Lars => Box::new(Lars(settings)),
            OptimizerName::Muon => {
                Box::new(AdamW { settings, lr_scale: settings.muon_adamw_lr_scale as f32 })
            }
            OptimizerName::OneBitAdam => {
                assert!(settings.freeze_step > 0, "1-bit Adam needs steps that update the second moment");
                let schedule = VarianceSchedule::Warmup { num_steps: settings.freeze_step };
                Box::new(CompressedAdam { settings, schedule })
            }
            OptimizerName::ZeroOneAdam => {
                let schedule = VarianceSchedule::Doubling { num_updates: settings.var_update_scaler };
                Box::new(CompressedAdam { settings, schedule })
            }
        }
    }

    /// Returns whether ranks exchange momentum instead of gradients in the steps that do not update the second moment.
    pub fn exchanges_momentum(self) -> bool {
        matches!(self, OptimizerName::OneBitAdam | OptimizerName::ZeroOneAdam)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn optimizers_use_settings_that_exist_and_each_is_used() {
        let known = OptimizerSettings::NAMES;
        let used: Vec<&str> =
            OptimizerName::ALL.into_iter().flat_map(|name| name.settings()).copied().collect();
        assert!(used.iter().all(|name| known.contains(name)), "{used:?}");
        assert!(known.iter().all(|name| used.contains(name)), "{known:?}");
    }
}
