//! Sign descent, for biases that balance the load of experts.

use super::rule::{Rule, StateSpec};
use crate::members::Member;
use crate::step::UnitStep;
use trireme_tensor::updates::Update;

/// Moves each element against the sign of its gradient, by the length that the rule holds. Ignores learning rate and weight decay.
#[derive(Debug)]
pub(crate) struct Sign(pub(crate) f32);

impl Rule for Sign {
    fn states(&self) -> &'static [StateSpec] {
        &[]
    }

    fn update(&self, _member: &Member, _step: &UnitStep<'_>) -> Update {
        Update::Sign { rate: self.0 }
    }
}
