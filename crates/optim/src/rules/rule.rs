//! The interface of elementwise optimizers.

use super::adam::CompressedAdam;
use crate::members::UpdatedParameter;
use crate::step::UnitStep;
use std::fmt::Debug;
use trireme_tensor::StepScale;
use trireme_tensor::updates::Update;

#[derive(Debug, Clone, Copy)]
pub(crate) struct StateSpec {
    pub(crate) name: &'static str,
    pub(crate) is_second_moment: bool,
}

impl StateSpec {
    pub(crate) const fn new(name: &'static str) -> Self {
        StateSpec { name, is_second_moment: false }
    }

    pub(super) const fn second_moment(name: &'static str) -> Self {
        StateSpec { name, is_second_moment: true }
    }
}

pub(crate) trait Rule: Debug + Send + Sync {
    /// Returns the states, at most two.
    fn states(&self) -> &'static [StateSpec];

    /// Returns the update of a member. If the rule needs sums, its learning rate is multiplied by [`scale`](Rule::scale).
    fn update(&self, member: &UpdatedParameter, step: &UnitStep<'_>) -> Update;

    /// Returns the number of sums over each full parameter that the update needs, in the first and in the second exchange.
    fn num_sums(&self) -> [usize; 2] {
        [0, 0]
    }

    /// Returns the [`Update`] that computes a member's sums for exchange `phase`, which is 0 or 1.
    fn sums_pass(&self, _phase: usize, _member: &UpdatedParameter, step: &UnitStep<'_>) -> Update {
        Update::Norms { grad_scale: step.grad_scale() }
    }

    /// Returns whether the update of [`sums_pass`](Rule::sums_pass) changes states.
    fn sums_pass_changes_states(&self, _phase: usize) -> bool {
        false
    }

    /// Returns how sums over a member scale its learning rate.
    ///
    /// # Panics
    /// If the rule needs no sums.
    fn scale(&self, _member: &UpdatedParameter, _step: &UnitStep<'_>) -> StepScale {
        unreachable!("{self:?} takes no sums")
    }

    /// Returns the rule if it is a [`CompressedAdam`]. Ranks may exchange momentum instead of gradients for such a rule.
    fn compressed_adam(&self) -> Option<&CompressedAdam> {
        None
    }
}
