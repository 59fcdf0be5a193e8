//! Updates as soon as the gradient of a unit is reduced.
//!
//! The norm of all gradients is known only at the end of the step, so a step clips by the norm of the previous step. The loss and the norm
//! are checked after the updates.

use super::Executor;
use crate::error::Result;
use crate::step::{GradNorm, StepPlan};

impl Executor {
    /// Updates a unit with its reduced gradient, and frees the gradient.
    pub(super) fn update_early(&mut self, unit: usize, plan: StepPlan) -> Result<()> {
        self.collect_waiting();
        let waited = self.waiting.waited;
        self.gradients.finish(unit)?;
        self.await_operations()?;
        self.timeline.exclude_wait(self.waiting.waited - waited);
        if plan.grad_norm != GradNorm::Off {
            self.sum_unit_squares(unit)?;
        }
        // The first step of a run has no norm to clip by.
        let norm = self.optimization.previous_norm;
        let grad_norm = if norm.is_some() { plan.grad_norm } else { GradNorm::Off };
        let settings = self.update_settings(StepPlan { grad_norm, ..plan }, self.grad_scale(), norm);
        self.update(unit, plan.step, settings)?;
        self.gradients.free_reduced(unit);
        Ok(())
    }
}
