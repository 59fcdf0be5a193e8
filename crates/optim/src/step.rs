//! Settings of one update, and the context that the rules of a unit share.

use crate::groups::ParameterSettings;
use crate::members::UpdatedParameter;
use trireme_tensor::{Device, ParameterTable};

/// Settings of an update that change from step to step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepSettings {
    /// Number of the update in the run, from 1. Skipped steps do not count, because they leave the moments as they are. A rule uses the
    /// number of updates since the state of its parameter began ([`Optimizer::set_state_start`](crate::Optimizer::set_state_start)).
    pub step: u64,
    /// Learning rate.
    pub lr: f64,
    /// Factor by which every gradient is multiplied. It combines the mean over microbatches, the loss scale, and clipping.
    pub grad_scale: f64,
}

/// The context of the update of one unit.
pub(crate) struct UnitStep<'a> {
    pub(crate) device: &'a Device,
    pub(crate) table: &'a ParameterTable,
    pub(crate) settings: StepSettings,
    /// [`Optimizer::state_start`](crate::Optimizer::state_start) of each parameter.
    pub(crate) starts: &'a [u64],
    /// Random bits for stochastic rounding of bf16 and int8 states.
    pub(crate) rounding_seed: u32,
}

impl UnitStep<'_> {
    pub(crate) fn lr(&self, own: ParameterSettings) -> f32 {
        (self.settings.lr * f64::from(own.lr_scale)) as f32
    }

    pub(crate) fn grad_scale(&self) -> f32 {
        self.settings.grad_scale as f32
    }

    /// Returns the number of this update since the member's state began, from 1.
    ///
    /// Panics if the state began at this update or later.
    pub(crate) fn update_number(&self, member: &UpdatedParameter) -> u64 {
        let (step, start) = (self.settings.step, self.starts[member.parameter]);
        assert!(start < step, "update {step} of a state that began after update {start}");
        step - start
    }

    /// Returns the number of elements of the member's full (unsharded) parameter.
    pub(crate) fn num_elements(&self, member: &UpdatedParameter) -> usize {
        self.table.parameters()[member.parameter].full_shape.num_elements()
    }

    /// Returns whether this rank contributes a member to sums over all ranks. If several ranks have the same elements, only the first does.
    pub(crate) fn contributes(&self, member: &UpdatedParameter) -> bool {
        self.table.parameters()[member.parameter].is_first_replica()
    }
}
