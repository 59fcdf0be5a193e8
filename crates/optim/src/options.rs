//! Options of an optimizer.

use crate::groups::{ParameterGroup, ParameterSettings};
use crate::rules::OptimizerName;
use crate::settings::OptimizerSettings;
use trireme_tensor::{ParameterClass, ParameterInfo, Precision, StateDType};

/// Options of an [`Optimizer`](crate::Optimizer).
#[derive(Debug, Clone, PartialEq)]
pub struct OptimizerOptions {
    /// The algorithm.
    pub name: OptimizerName,
    /// Settings of the algorithm.
    pub settings: OptimizerSettings,
    /// Weight decay of matrices and embeddings.
    pub weight_decay: f32,
    /// Whether weight decay also applies to norms and biases.
    pub decay_norms_and_biases: bool,
    /// Groups of parameters with their own settings. If several groups match a parameter, the first one applies.
    pub groups: Vec<ParameterGroup>,
    /// Data type of the state. Units of fewer than [`OptimizerOptions::INT8_ELEMENTS_MIN`] elements use f32 instead of int8.
    pub state_dtype: StateDType,
    /// Step length of biases that [balance](trireme_tensor::ParameterClass::Balance) the load of experts, for every optimizer.
    pub balance_rate: f32,
    /// Precision of Muon's matrix products. Other optimizers ignore it.
    pub precision: Precision,
}

impl OptimizerOptions {
    /// Returns whether the parameter with this name is frozen.
    pub fn is_frozen(&self, name: &str) -> bool {
        self.group_of(name).is_some_and(|group| group.frozen)
    }

    /// Returns the first group whose pattern matches the name of a parameter.
    pub(crate) fn group_of(&self, name: &str) -> Option<&ParameterGroup> {
        self.groups.iter().find(|group| group.matches(name))
    }

    /// Returns the settings of a parameter: its group's, or else the defaults of its class.
    pub(crate) fn settings_of(&self, info: &ParameterInfo) -> ParameterSettings {
        let decays = match info.class {
            ParameterClass::Matrix | ParameterClass::Embedding => true,
            ParameterClass::Vector => self.decay_norms_and_biases,
            ParameterClass::Balance => false,
        };
        let weight_decay = if decays { self.weight_decay } else { 0.0 };
        let group = self.group_of(&info.name);
        ParameterSettings {
            lr_scale: group.map_or(1.0, |group| group.lr_scale),
            weight_decay: group.and_then(|group| group.weight_decay).unwrap_or(weight_decay),
            beta1: group.and_then(|group| group.beta1),
            beta2: group.and_then(|group| group.beta2),
        }
    }

    /// Default step length of biases that balance experts (DeepSeek-AI, "DeepSeek-V3 technical report", 2024, section 4.2).
    pub const BALANCE_RATE: f32 = 1e-3;

    /// Minimum number of elements of a unit for int8 state. In smaller units, blocks are too short to save bytes.
    pub const INT8_ELEMENTS_MIN: usize = 1 << 16;

    /// Returns options with the default settings, without weight decay and groups, and with f32 state and products.
    pub fn new(name: OptimizerName) -> Self {
        OptimizerOptions {
            name,
            settings: OptimizerSettings::DEFAULT,
            weight_decay: 0.0,
            decay_norms_and_biases: false,
            groups: Vec::new(),
            state_dtype: StateDType::F32,
            balance_rate: Self::BALANCE_RATE,
            precision: Precision::F32,
        }
    }
}
