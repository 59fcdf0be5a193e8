//! LAMB (You et al. 2020): Adam whose updates have a norm proportional to the parameter's norm.

use super::adam::{MOMENTS, adamw_step};
use super::rule::{Rule, StateSpec};
use crate::members::UpdatedParameter;
use crate::settings::OptimizerSettings;
use crate::step::UnitStep;
use trireme_tensor::StepScale;
use trireme_tensor::updates::Update;

#[derive(Debug)]
pub(super) struct Lamb(pub(super) OptimizerSettings);

impl Rule for Lamb {
    fn states(&self) -> &'static [StateSpec] {
        MOMENTS
    }

    fn update(&self, member: &UpdatedParameter, step: &UnitStep<'_>) -> Update {
        Update::Lamb(adamw_step(self.0, member, step))
    }

    fn num_sums(&self) -> [usize; 2] {
        [2, 0]
    }

    fn sums_pass(&self, _phase: usize, member: &UpdatedParameter, step: &UnitStep<'_>) -> Update {
        Update::LambMoments(adamw_step(self.0, member, step))
    }

    fn sums_pass_changes_states(&self, _phase: usize) -> bool {
        true
    }

    fn scale(&self, _member: &UpdatedParameter, _step: &UnitStep<'_>) -> StepScale {
        StepScale::TrustRatio { weight_decay: 0.0 }
    }
}
