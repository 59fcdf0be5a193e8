//! Programs of several steps, for a pipeline that does not drain between updates.
//!
//! A rank updates its units as soon as their gradients are reduced, independently of the other pipeline ranks. So it clips by the global
//! gradient norm of an earlier step, and the outcomes of all steps are known only at the end of the program.

use super::Executor;
use crate::error::{ParallelError, Result};
use crate::step::{GradNorm, NonFinite, Skipped, StepOutcome, StepPlan};
use trireme_base::ReduceOp;
use trireme_optim::StepSettings;

fn not_finite(step: u64, what: NonFinite, value: f64) -> ParallelError {
    ParallelError::NotFinite { step, what, value, may_have_updated: true }
}

impl Executor {
    /// Updates a unit with the gradients of its next step.
    pub(super) fn update_asynchronously(&mut self, unit: usize, plans: &[StepPlan]) -> Result<()> {
        let updates = self.updates.as_ref().expect("the program does not drain");
        let step = updates.units[unit].newest;
        let settings = match updates.settings {
            Some((of, settings)) if of == step => settings,
            _ => self.finish_step_gradients(step, plans[step])?,
        };
        match settings {
            Some(settings) => self.update(unit, plans[step].step, settings)?,
            None => self.gradients.free_gathered(unit),
        }
        let updates = self.updates.as_mut().expect("it was there");
        updates.settings = Some((step, settings));
        updates.units[unit].newest += 1;
        Ok(())
    }

    /// Waits for this rank's reductions of a step, and checks the results. Returns the settings of the update, or `None` if the step is
    /// skipped.
    fn finish_step_gradients(&mut self, step: usize, plan: StepPlan) -> Result<Option<StepSettings>> {
        if !plan.has_loss {
            self.optimization.loss_scaler.skip();
            let updates = self.updates.as_mut().expect("the program does not drain");
            updates.squares.as_mut().expect("they are summed at the end")[step] = 0.0;
            (updates.has_norms[step], updates.compression[step]) = (false, None);
            return Ok(None);
        }
        self.collect_waiting();
        let waited = self.waiting.waited;
        self.gradients.wait()?;
        self.await_operations()?;
        let mut waiting = std::mem::take(&mut self.waiting);
        let mut known_norm = None;
        if plan.grad_norm != GradNorm::Off {
            let norm = self.sum_of_squares(false, &mut waiting)?.sqrt() * self.grad_scale();
            if !norm.is_finite() {
                return Err(not_finite(plan.step, NonFinite::GradNorm, norm));
            }
            let has_momentum = self.may_exchange_momentum(self.update_number(plan));
            let updates = self.updates.as_mut().expect("the program does not drain");
            updates.has_norms[step] = !has_momentum;
            updates.squares.as_mut().expect("they are summed at the end")[step] = norm * norm;
            known_norm = Some(norm);
            if let GradNorm::Clip(_) = plan.grad_norm {
                // In the first steps of a run, there is no earlier global norm, and the rank clips by its own.
                let earlier = updates.norms.advance(norm * norm, &mut waiting)?;
                known_norm = earlier.or(known_norm);
            }
        }
        let compression = self.compression_statistics();
        let updates = self.updates.as_mut().expect("the program does not drain");
        updates.compression[step] = compression;
        if !matches!(plan.grad_norm, GradNorm::Clip(_)) {
            // The norms of steps that do not clip are not summed over the ranks.
            updates.norms.known.clear();
        }
        self.timeline.exclude_wait(waiting.waited - waited);
        self.waiting = waiting;
        Ok(Some(self.update_settings(plan, self.grad_scale(), known_norm)))
    }

    /// Ends a program: waits for losses and norms, and appends the outcomes of the steps.
    pub(super) fn finish_steps(&mut self, plans: &[StepPlan], outcomes: &mut Vec<StepOutcome>) -> Result<()> {
        self.messages.finish_until(0, &mut self.waiting)?;
        self.await_operations()?;
        let mut waiting = std::mem::take(&mut self.waiting);
        let Executor { updates, reports, ranks, optimization, .. } = self;
        let updates = updates.as_mut().expect("the program does not drain");
        updates.settings = None;
        updates.units.iter_mut().for_each(|unit| unit.newest = 0);
        // The reports are gathered before any other operation over all ranks. Ranks that run the last loss have already sent their reports,
        // unless their device is asynchronous.
        let losses = reports.wait(&mut waiting)?;
        updates.norms.wait(0, &mut waiting)?;
        let squares = updates.squares.take().expect("they are summed once a program");
        let squares = waiting.wait(ranks.pipeline().all_reduce(squares, ReduceOp::Sum))?;
        let comm_exposed = waiting.waited / plans.len() as u32;
        for (step, ((&loss, plan), square)) in losses.iter().zip(plans).zip(&squares[..]).enumerate() {
            if plan.has_loss && !loss.is_finite() {
                return Err(not_finite(plan.step, NonFinite::Loss, loss));
            }
            outcomes.push(StepOutcome {
                loss: if plan.has_loss { loss } else { f64::NAN },
                grad_norm: (plan.grad_norm != GradNorm::Off && updates.has_norms[step])
                    .then_some(square.sqrt()),
                loss_scale: optimization.loss_scaler.scale(),
                skipped: (!plan.has_loss).then_some(Skipped::NoLoss),
                comm_exposed,
                compression: updates.compression[step],
            });
        }
        updates.squares = Some(squares);
        Ok(())
    }
}
