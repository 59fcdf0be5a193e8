//! Sizes of what a rank keeps from use to use.

use trireme_base::UnitPasses;
use trireme_schedule::{StateClass, StateOf};

/// State of a unit on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct UnitSizes {
    /// Bytes of the optimizer's state, of the parameters, and of the gradient, each as far as it moves as one.
    pub state: [usize; 3],
    /// Elements of the parameters that the rank steps.
    pub shard_len: usize,
    /// What passes take.
    pub passes: UnitPasses,
}

/// State of a model on one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StateSizes {
    /// In forward order.
    pub units: Vec<UnitSizes>,
    /// Bytes of an element of what whole parameters are gathered in.
    pub gather_bytes: usize,
    /// Bytes of an element of a shard's gradient.
    pub gradient_bytes: usize,
}

impl StateSizes {
    /// Bytes of a unit's state; of activations, what a pass keeps at most.
    pub(crate) fn of(&self, state: StateOf) -> usize {
        let unit = &self.units[state.unit];
        match state.class {
            StateClass::Activations => unit.passes.record,
            class => unit.state[class as usize],
        }
    }
}

/// A tensor of a microbatch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchMemory {
    /// Its bytes.
    pub bytes: usize,
    /// The units that read it.
    pub readers: Vec<usize>,
}
