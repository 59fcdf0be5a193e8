//! The end of a step: waits for its sums, checks them for overflows, and computes the settings of the update.
//!
//! The first update of a step waits for all reductions, even if the step does not clip: no parameter may change until the loss is known to
//! be finite and every operation has succeeded (`early_updates` describes layouts without this wait). One factor for all gradients then
//! accounts for the number of microbatches, the loss scale and clipping ([`Executor::update_settings`]).

use super::Executor;
use crate::error::{ParallelError, Result};
use crate::memory::WaitTracker;
use crate::step::{GradNorm, NonFinite, Skipped, StepOutcome, StepPlan};
use trireme_codec::{CodecName, CompressionStatistics};
use trireme_optim::{LossScaling, StepSettings, clip_coefficient};
use trireme_schedule::StateClass;
use trireme_tensor::{Category, CowTensor};

impl Executor {
    /// Waits for all reductions. Returns the outcome of the step, and the settings of the update unless the step is skipped.
    ///
    /// All ranks make the same decision without a further message, because the sums that they check have the same bits.
    pub(super) fn finish_gradients(&mut self, plan: StepPlan) -> Result<(StepOutcome, Option<StepSettings>)> {
        let (loss, mut waiting) = self.finish_reductions()?;
        self.timeline.start(&self.device);
        let waited = waiting.waited;
        let loss_scale = self.optimization.loss_scaler.scale();
        let grad_scale = self.grad_scale();
        let is_scaled = self.optimization.loss_scaler.scaling() != LossScaling::Off;
        let norm = if is_scaled || plan.grad_norm != GradNorm::Off {
            Some(self.sum_of_squares(true, &mut waiting)?.sqrt() * grad_scale)
        } else {
            None
        };
        self.timeline.exclude_wait(waiting.waited - waited);
        let overflow = match norm {
            _ if !loss.is_finite() => Some((NonFinite::Loss, loss)),
            Some(norm) if !norm.is_finite() => Some((NonFinite::GradNorm, norm)),
            _ => None,
        };
        let skipped = overflow.map(|(what, _)| Skipped::Overflow(what));
        // The norm of momentum only shows whether the step has overflowed, so it is not reported as a gradient norm.
        let step = self.update_number(plan);
        let has_momentum = self.exchanges_momentum(step);
        let grad_norm = norm.filter(|_| !self.may_exchange_momentum(step));
        let compression = self.compression_statistics();
        let comm_exposed = waiting.waited;
        let outcome = StepOutcome { loss, grad_norm, loss_scale, skipped, comm_exposed, compression };
        match overflow {
            Some((what, value)) => self.back_off(plan.step, what, value)?,
            None => self.optimization.loss_scaler.succeed(),
        }
        if self.program.header.state.updates_early {
            let is_clipped = matches!(plan.grad_norm, GradNorm::Clip(_));
            self.optimization.previous_norm = norm.filter(|_| is_clipped);
        }
        self.rescale_compressors(loss_scale);
        if skipped.is_some() {
            if has_momentum {
                self.gradients.roll_back_compression()?;
            }
            return Ok((outcome, None));
        }
        Ok((outcome, Some(self.update_settings(plan, grad_scale, grad_norm))))
    }

    /// Skips all steps of a program, because nothing counts in their losses. Runs neither passes nor reductions, so parameters, optimizer
    /// and compressors do not change. Ranks still exchange their [requests](Executor::requests).
    pub(super) fn skip_steps(&mut self, plans: &[StepPlan], outcomes: &mut Vec<StepOutcome>) -> Result<()> {
        self.timeline.begin(&self.device)?;
        // The following operations belong to no line of a program.
        self.ranks.forget_line();
        let mut waiting = WaitTracker::default();
        self.reports.wait(&mut waiting)?;
        for _ in plans {
            self.optimization.loss_scaler.skip();
            outcomes.push(StepOutcome {
                loss: f64::NAN,
                grad_norm: None,
                loss_scale: self.optimization.loss_scaler.scale(),
                skipped: Some(Skipped::NoLoss),
                comm_exposed: waiting.waited / plans.len() as u32,
                compression: None,
            });
        }
        Ok(())
    }

    /// Returns the factor that turns the sum of gradients over all microbatches of all ranks into the mean.
    pub(super) fn grad_scale(&self) -> f64 {
        1.0 / (self.gradient_divisor() * self.ranks.data().world_size() as f64)
    }

    /// Returns the settings of an update with gradients of this scale. `norm` is the gradient norm, and must be known if the plan clips.
    pub(super) fn update_settings(&self, plan: StepPlan, grad_scale: f64, norm: Option<f64>) -> StepSettings {
        let clipping = match plan.grad_norm {
            GradNorm::Clip(norm_max) => {
                clip_coefficient(norm.expect("a step that clips exchanges gradients"), norm_max)
            }
            _ => 1.0,
        };
        StepSettings { step: self.update_number(plan), lr: plan.lr, grad_scale: grad_scale * clipping }
    }

    /// Returns the compression statistics of this step. The error norm has the scale of the gradient norm.
    pub(super) fn compression_statistics(&self) -> Option<CompressionStatistics> {
        if self.options.compression.codec() == CodecName::None {
            return None;
        }
        let mut statistics = self.gradients.compression_statistics();
        if !self.optimization.optimizer.exchanges_momentum() {
            statistics.error_norm /= self.gradient_divisor() as f32;
        }
        Some(statistics)
    }

    /// Returns the divisor that turns a rank's sum of gradients into its mean gradient. The gradient of a microbatch is the mean over its
    /// rows, times the loss scale. Normalized gradients no longer depend on the number of microbatches or the loss scale, so their divisor
    /// is 1.
    pub(super) fn gradient_divisor(&self) -> f64 {
        if self.options.compression.normalize().is_some() {
            return 1.0;
        }
        self.program.header.microbatches_per_step() as f64 * f64::from(self.optimization.loss_scaler.scale())
    }

    /// Rescales the gradients stored in compressors: `from` is their loss scale, and they get the loss scale of the next step. Momentum has
    /// no loss scale.
    fn rescale_compressors(&mut self, from: u32) {
        let to = self.optimization.loss_scaler.scale();
        if to != from && !self.optimization.optimizer.exchanges_momentum() {
            let factor = to as f32 / from as f32;
            self.gradients.compressors_mut().for_each(|(_, compressor)| compressor.rescale(factor));
        }
    }

    /// Returns the sum of squares of all gradients of this pipeline rank, or of all pipeline ranks if `across_pipeline` is true.
    pub(super) fn sum_of_squares(&mut self, across_pipeline: bool, waiting: &mut WaitTracker) -> Result<f64> {
        for unit in 0..self.model.num_units() {
            // Gradients that are offloaded or freed early were squared before that.
            if !self.program.header.holds(unit) {
                self.optimization.squares.skip(unit);
            } else if !self.offload.stores.moves(StateClass::Gradients)
                && !self.program.header.state.updates_early
            {
                self.sum_unit_squares(unit)?;
            }
        }
        let ranks = &self.ranks;
        let groups = [ranks.grad_norm_group().0, ranks.tensor(), ranks.pipeline()];
        self.optimization.squares.sum(if across_pipeline { &groups } else { &groups[..2] }, waiting)
    }

    /// Waits for all operations on which issued kernels depend. Must be called before kernels compute results that outlast the step. After
    /// a failure, every later call fails.
    pub(super) fn await_operations(&mut self) -> Result<()> {
        self.collect_waiting();
        let awaited = self.waiting.await_operations();
        if let Err(failure) = awaited {
            self.failure.get_or_insert(failure);
        }
        // Kernels read zeros in place of the vector of a failed operation, so memory that outlasts the step may be wrong.
        self.failure.clone().map_or(Ok(()), |failure| Err(failure.into()))
    }

    /// Runs `work` and waits for its operations. These waits do not count in any step.
    pub(super) fn outside_step<R>(&mut self, work: impl FnOnce(&mut Self) -> Result<R>) -> Result<R> {
        self.collect_waiting();
        let waited = self.waiting.waited;
        let result = work(self).and_then(|made| self.await_operations().map(|()| made));
        self.waiting.waited = waited;
        result
    }

    pub(super) fn collect_waiting(&mut self) {
        self.waiting.add(self.gradients.take_waiting());
        self.waiting.add(self.passes.axes.take_waiting());
    }

    /// Computes the sum of squares of this rank's part of a unit's gradient.
    pub(super) fn sum_unit_squares(&mut self, unit: usize) -> Result<()> {
        let device = self.gradients.reduced_device(unit);
        let grads = CowTensor::in_f32(device, self.gradients.reduced(unit), Category::Communication)?;
        self.optimization.squares.compute(unit, grads.view(), self.gradients.part(unit), device)
    }

    /// Waits for all reductions. Returns the mean loss over the global batch, and the time that this rank has waited in this step.
    fn finish_reductions(&mut self) -> Result<(f64, WaitTracker)> {
        self.gradients.wait()?;
        self.messages.finish_until(0, &mut self.waiting)?;
        self.await_operations()?;
        let mut waiting = std::mem::take(&mut self.waiting);
        let loss = self.reports.wait(&mut waiting)?[0];
        if let Some(fp8) = &mut self.passes.fp8 {
            fp8.advance(&self.device, self.ranks.world(), &mut waiting)?;
        }
        Ok((loss, waiting))
    }

    /// Lowers the loss scale after a step in which the quantity `what` was `value`.
    ///
    /// # Errors
    /// If there is no loss scaling, or if the scale cannot decrease further.
    fn back_off(&mut self, step: u64, what: NonFinite, value: f64) -> Result<()> {
        if self.optimization.loss_scaler.scaling() == LossScaling::Off {
            let may_have_updated = self.program.header.state.updates_early;
            return Err(ParallelError::NotFinite { step, what, value, may_have_updated });
        }
        let loss_scale = self.optimization.loss_scaler.scale();
        if self.optimization.loss_scaler.back_off().is_none() {
            let skipped_steps = self.optimization.loss_scaler.skipped_steps();
            return Err(ParallelError::LossScaleExhausted { step, what, value, loss_scale, skipped_steps });
        }
        Ok(())
    }
}
