//! Sizes of a rank's units: of their state and of their passes.

use trireme_base::UnitPasses;
use trireme_schedule::{StateClass, StateKey};

/// Sizes of a unit on one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct UnitSizes {
    /// Bytes of the optimizer state, the parameters and the gradient of the unit, indexed by [`StateClass`]. Each class is moved in one
    /// transfer.
    pub state: [usize; 3],
    /// Number of parameter elements that the rank updates.
    pub shard_len: usize,
    /// Memory and cost of the unit's passes over a microbatch.
    pub passes: UnitPasses,
}

/// Sizes of a model on one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModelSizes {
    /// The units, in forward order.
    pub units: Vec<UnitSizes>,
    /// Bytes per element of gathered (unsharded) parameters.
    pub gathered_bytes_per_element: usize,
    /// Bytes per element of a gradient shard.
    pub gradient_bytes_per_element: usize,
}

impl ModelSizes {
    /// Returns the bytes of a piece of state. For activations, returns the maximum that a forward pass may keep.
    pub(crate) fn state_bytes(&self, state: StateKey) -> usize {
        let unit = &self.units[state.unit];
        match state.class {
            StateClass::Activations => unit.passes.saved,
            class => unit.state[class as usize],
        }
    }
}

/// A tensor of a microbatch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchTensorSize {
    /// Size in bytes.
    pub bytes: usize,
    /// Indices of the units that read it.
    pub readers: Vec<usize>,
}
