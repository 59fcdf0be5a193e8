//! Sign descent, for biases that balance the load of experts.

use super::rule::{Rule, StateSpec};
use crate::members::UpdatedParameter;
use crate::step::UnitStep;
use trireme_tensor::updates::Update;

/// Moves each element against the sign of its gradient, by the length that the rule holds. Ignores learning rate and weight decay.
#[derive(Debug)]
pub(crate) struct Sign(pub(crate) f32);

impl Rule for Sign {
    fn states(&self) -> &'static [StateSpec] {
        &[]
    }

    fn update(&self, _member: &UpdatedParameter, _step: &UnitStep<'_>) -> Update {
        Update::Sign { lr: self.0 }
    }
}
