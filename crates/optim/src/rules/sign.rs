//! Sign descent, for biases that balance the load of experts.

use super::rule::{Rule, StateSpec};
use crate::members::Member;
use crate::step::UnitStep;
use trireme_tensor::updates::Update;

/// A step of this length against the sign of the gradient. Ignores learning rate and weight decay.
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
