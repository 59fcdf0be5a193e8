//! A step against the sign of the gradient, for biases that balance the load of experts.

use super::{Rule, StateName};
use crate::members::Member;
use crate::step::UnitStep;
use trireme_tensor::updates::Update;

/// The length of the step. Neither learning rate nor weight decay counts.
#[derive(Debug)]
pub(crate) struct Sign(pub(crate) f32);

impl Rule for Sign {
    fn states(&self) -> &'static [StateName] {
        &[]
    }

    fn update(&self, _member: &Member, _step: &UnitStep<'_>) -> Update {
        Update::Sign { rate: self.0 }
    }
}
