//! The settings of all optimizers, with documentation, defaults and ranges.

use std::ops::{Bound, RangeBounds};

trireme_base::named! {
    /// The scale of Muon's orthogonal updates.
    pub enum MuonScale {
        /// `sqrt(max(1, rows / cols))` (Jordan 2024).
        Original = "original",
        /// `0.2 sqrt(max(rows, cols))`. Updates have the root mean square of AdamW's, so AdamW's learning rates fit (Liu et al., "Muon is
        /// scalable for LLM training", 2025).
        MatchRmsAdamW = "match_rms_adamw",
    }
}

/// The range of a setting.
pub type Limits<T> = (Bound<T>, Bound<T>);

/// A mutable reference to a setting, with its range if it is a number.
pub enum SettingValue<'a> {
    /// A number.
    Number(&'a mut f64, Limits<f64>),
    /// A non-negative integer.
    Count(&'a mut u64, Limits<u64>),
    /// A switch.
    Flag(&'a mut bool),
    /// The scale of Muon's updates.
    MuonScale(&'a mut MuonScale),
}

/// A setting by name, for configs that are read key by key.
pub struct Setting<'a> {
    /// Its name in configs.
    pub name: &'static str,
    /// Its documentation, one line per element.
    pub docs: &'static [&'static str],
    /// A reference to its value.
    pub value: SettingValue<'a>,
}

/// Returns the range of all numbers above `low`.
const fn above(low: f64) -> Limits<f64> {
    (Bound::Excluded(low), Bound::Unbounded)
}

fn limits<T: Copy>(range: impl RangeBounds<T>) -> Limits<T> {
    (range.start_bound().cloned(), range.end_bound().cloned())
}

/// Defines the settings with their defaults and, for numbers, their ranges.
macro_rules! optimizer_settings {
    ($(
        $(#[doc = $doc:literal])+
        $name:ident: $type:ident = $default:expr $(, within $range:expr)?;
    )+) => {
        /// The settings of all optimizers. [`OptimizerName::settings`](crate::OptimizerName::settings) lists the settings of each
        /// optimizer. The other settings should keep their defaults.
        #[derive(Debug, Clone, Copy, PartialEq)]
        pub struct OptimizerSettings {
            $($(#[doc = $doc])+ pub $name: $type,)+
        }

        impl OptimizerSettings {
            /// The default settings.
            pub const DEFAULT: OptimizerSettings = OptimizerSettings { $($name: $default,)+ };

            /// Names of all settings.
            pub const NAMES: &[&str] = &[$(stringify!($name)),+];

            /// Returns mutable references to all settings. The caller must check the ranges.
            pub fn list(&mut self) -> Vec<Setting<'_>> {
                Vec::from([$(Setting {
                    name: stringify!($name),
                    docs: &[$($doc),+],
                    value: optimizer_settings!(@value $type, &mut self.$name $(, limits($range))?),
                },)+])
            }
        }
    };
    (@value f64, $($of:expr),+) => { SettingValue::Number($($of),+) };
    (@value u64, $($of:expr),+) => { SettingValue::Count($($of),+) };
    (@value bool, $of:expr) => { SettingValue::Flag($of) };
    (@value MuonScale, $of:expr) => { SettingValue::MuonScale($of) };
}

optimizer_settings! {
    /// Decay rate of the mean of gradients (Adam variants, muon's other parameters). For lion, the weight of that
    /// mean in the update; the gradient has the rest.
    beta1: f64 = 0.9, within 0.0..1.0;
    /// Decay rate of the mean of squared gradients (Adam variants, muon's other parameters), or of the mean of
    /// gradients (lion).
    beta2: f64 = 0.95, within 0.0..1.0;
    /// Weight of the mean of gradients in the update; the gradient itself has the rest (adamw, adam; QHAdam).
    /// When gradients belong to old weights, as in pipelines that do not drain, 0.78 works better than 1.
    nu: f64 = 1.0, within 0.0..=1.0;
    /// Epsilon added to the denominator of the update (Adam variants, muon's other parameters).
    eps: f64 = 1e-8, within above(0.0);
    /// Decay rate of the velocity (sgd, lars).
    momentum: f64 = 0.9, within 0.0..1.0;
    /// Whether to use Nesterov momentum (sgd).
    nesterov: bool = false;
    /// A new squared gradient enters the second moment with weight step^beta2_decay (adafactor).
    beta2_decay: f64 = -0.8, within -1.0..0.0;
    /// Maximum root mean square of an update; larger updates are scaled down to it (adafactor).
    clip_threshold: f64 = 1.0, within above(0.0);
    /// Whether learning rates are relative to the parameter's root mean square, and at most 1 / sqrt(step)
    /// (adafactor).
    relative_step: bool = true;
    /// Length of an update relative to its parameter's length, before the learning rate (lars).
    trust_coefficient: f64 = 1e-3, within above(0.0);
    /// Decay rate of the mean of gradients of hidden matrices (muon); the momentum is Nesterov's.
    muon_momentum: f64 = 0.95, within 0.0..1.0;
    /// Number of Newton-Schulz iterations (muon).
    muon_iterations: u64 = 5, within 1..=20;
    /// How updates of matrices are scaled (muon): `original`, by sqrt(max(1, rows / cols)), or `match_rms_adamw`,
    /// by 0.2 sqrt(max(rows, cols)), which suits learning rates of AdamW.
    muon_scale: MuonScale = MuonScale::MatchRmsAdamW;
    /// AdamW's learning rate for everything except hidden matrices, relative to `lr` (muon).
    muon_adamw_lr_scale: f64 = 1.0, within 0.0..;
    /// Number of first steps that update the second moment (one_bit_adam; also `freeze_step` of DeepSpeed). In a config, 0 means a
    /// fifth of the run; the library needs at least 1.
    freeze_step: u64 = 0, within 0..;
    /// Number of updates of the second moment after which the interval between them doubles (zero_one_adam; also
    /// `var_update_scaler` of DeepSpeed).
    var_update_scaler: u64 = 16, within 1..=1 << 32;
}

impl Default for OptimizerSettings {
    fn default() -> Self {
        OptimizerSettings::DEFAULT
    }
}
