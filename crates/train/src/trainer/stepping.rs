//! One run of the step program, and the records of its steps.

use super::Trainer;
use crate::dataset::read_batch;
use crate::error::TrainError;
use crate::metrics::{MemoryPeakBytes, StepRecord};
use std::time::{Duration, Instant, UNIX_EPOCH};
use trireme_base::{Bytes, Category};
use trireme_optim::LossScaling;
use trireme_parallel::{GradNorm, NonFinite, Skipped, StepOutcome, StepPlan};

/// Number of first steps whose predicted and measured times are compared. The first [`NUM_WARMING_UP`] of them do not count.
pub(super) const NUM_COMPARED: usize = 10;
const NUM_WARMING_UP: usize = 3;

impl Trainer<'_> {
    /// Runs the program once, and records the result of each of its steps.
    pub(super) fn advance(&mut self) -> Result<(), TrainError> {
        let began = Instant::now();
        let bytes_before = self.executor.ranks().payload_bytes();
        let training = self.config.training();
        let last_step = self.records.iter().map(|record| record.step_seconds).sum();
        self.request_checkpoint(Duration::from_secs_f64(last_step));
        self.request_end();
        let grad_norm =
            if training.max_norm > 0.0 { GradNorm::Clip(training.max_norm) } else { GradNorm::Measure };
        let num_steps = self.executor.program().header.num_steps();
        let schedule = &self.schedule;
        let steps = self.state.step + 1..=self.state.step + num_steps as u64;
        self.step_plans.clear();
        self.step_plans.extend(steps.map(|step| StepPlan {
            step,
            lr: schedule.lr(step),
            grad_norm,
            has_loss: true,
        }));
        self.load_batches()?;
        self.outcomes.clear();
        let last_step = self.state.step + num_steps as u64;
        self.executor.record_kernel_times(self.traces(last_step));
        self.executor.run_steps(&self.step_plans, &mut self.batches.drain(..), &mut self.outcomes)?;
        self.notice_pinning();
        if let Some(balance) = &mut self.rebalancer
            && !self.executor.timeline().is_empty()
        {
            balance.observe(&self.executor);
        }
        self.program_time = began.elapsed();
        let step_seconds = self.program_time.as_secs_f64() / num_steps as f64;
        let comm_bytes = (self.executor.ranks().payload_bytes() - bytes_before) / num_steps as u64;
        self.records.resize_with(num_steps, StepRecord::default);
        for index in 0..num_steps {
            let mut metrics = std::mem::take(&mut self.records[index].metrics);
            metrics.clear();
            self.executor.metrics(index).for_each(|metric| metrics.push(metric));
            let record = self.record(self.step_plans[index], self.outcomes[index], step_seconds, comm_bytes);
            self.records[index] = StepRecord { metrics, ..record };
        }
        self.finish_hashes()
    }

    /// Records the result of a step. `step_seconds` and `comm_bytes` are its share of the program's time and bytes.
    fn record(
        &mut self,
        plan: StepPlan,
        outcome: StepOutcome,
        step_seconds: f64,
        comm_bytes: u64,
    ) -> StepRecord {
        let samples = self.config.training().global_batch_size as u64;
        let tokens = self.train.tokens_per_sample().map(|tokens| samples * tokens);
        self.state.step = plan.step;
        self.state.next_sample += samples;
        self.state.tokens += tokens.unwrap_or_default();
        self.state.loss_scaler = self.executor.loss_scaler().state();
        self.notice_skipped(&outcome);
        self.compare_times(step_seconds);
        let is_scaled = self.executor.loss_scaler().scaling() != LossScaling::Off;
        let compression = outcome.compression;
        let spilled = self.spill.as_ref().map(|spill| spill.peak()).filter(|&peak| peak > 0);
        if spilled.is_some() && !std::mem::replace(&mut self.has_reported_spill, true) {
            let folder = self.config.offload().folder.display();
            let needed = self.options.plan.as_ref().map(|plan| {
                let needed = plan.non_activation_bytes + plan.predicted.categories.get(Category::Activations);
                format!(" above {}, which even loads need at most", Bytes(needed as u64))
            });
            let text = format!(
                "activations do not fit beside what everything else takes at most, so some spill to {folder}; raise [memory] device_budget{}, \
                 set [experts] capacity_factor, or even loads out (docs/experts.md)",
                needed.unwrap_or_default()
            );
            self.observer.notice_of_worker(self.executor.group().rank(), &text);
        }
        StepRecord {
            step: plan.step,
            loss: outcome.loss,
            grad_norm: outcome.grad_norm.unwrap_or(f64::NAN),
            lr: plan.lr,
            samples: self.state.next_sample,
            epoch: self.state.next_sample as f64 / self.train.num_samples() as f64,
            unix_seconds: UNIX_EPOCH.elapsed().map_or(0.0, |since| since.as_secs_f64()),
            samples_per_second: samples as f64 / step_seconds,
            tokens: tokens.map(|_| self.state.tokens),
            tokens_per_second: tokens.map(|tokens| tokens as f64 / step_seconds),
            step_seconds,
            comm_seconds_exposed: outcome.comm_exposed.as_secs_f64(),
            comm_bytes,
            memory_peak_bytes: MemoryPeakBytes::measured(self.executor.device()),
            memory_predicted_bytes: self.options.plan.as_ref().map(|plan| plan.predicted),
            memory_spilled_bytes: spilled.map(|bytes| bytes as u64),
            step_seconds_predicted: self.options.plan.as_ref().and_then(|plan| plan.step_seconds),
            compression_bytes_saved: compression
                .map(|found| found.bytes_uncompressed.saturating_sub(found.bytes_sent)),
            compression_error_norm: compression.map(|found| f64::from(found.error_norm)),
            loss_scale: is_scaled.then_some(outcome.loss_scale),
            mfu: self.mfu(step_seconds),
            skipped_steps: is_scaled.then_some(self.state.loss_scaler.skipped_steps),
            ..StepRecord::default()
        }
    }

    /// Returns the model FLOPs utilization of a step. `None` without a known peak, and for a program whose steps were all skipped, because
    /// it runs no pass.
    fn mfu(&mut self, step_seconds: f64) -> Option<f64> {
        const LOW_PEAK: &str = "steps are faster than the peak that is known of the devices, so MFU is left out: it was measured while other programs \
                                computed, or [metrics] peak_flops is too small";
        let mfu = self.utilization.mfu(step_seconds).filter(|_| !self.executor.timeline().is_empty())?;
        if mfu > 1.0 {
            self.report_once(LOW_PEAK.to_owned());
            return None;
        }
        Some(mfu)
    }

    /// Reports after [`NUM_COMPARED`] steps how far the prediction of their time was off.
    fn compare_times(&mut self, step_seconds: f64) {
        let Some(predicted) = self.options.plan.as_ref().and_then(|plan| plan.step_seconds) else { return };
        if self.first_step_seconds.len() == NUM_COMPARED {
            return;
        }
        self.first_step_seconds.push(step_seconds);
        if self.first_step_seconds.len() == NUM_COMPARED {
            let compared = &mut self.first_step_seconds[NUM_WARMING_UP..];
            compared.sort_by(f64::total_cmp);
            let measured = compared[compared.len() / 2];
            let off = 100.0 * (predicted / measured - 1.0);
            let which = if off < 0.0 { "less" } else { "more" };
            self.observer.notice(&format!(
                "step time: {measured:.4} s (median of steps {} to {NUM_COMPARED} of this run); predicted {predicted:.4} s, {:.1} % {which}",
                NUM_WARMING_UP + 1,
                off.abs()
            ));
        }
    }

    /// Reports a step that was skipped. A skipped step uses up its data and its place in the schedule.
    fn notice_skipped(&mut self, outcome: &StepOutcome) {
        let step = self.state.step;
        let Some(skipped) = outcome.skipped else { return };
        let (from, to) = (outcome.loss_scale, self.executor.loss_scaler().scale());
        let overflowed =
            |what| format!("step {step}: {what} overflowed in f16; step skipped, loss scale {from} → {to}");
        let text = match skipped {
            Skipped::Overflow(NonFinite::Loss) => overflowed("the loss"),
            Skipped::Overflow(NonFinite::GradNorm) => overflowed("gradients"),
            Skipped::NoLoss => format!(
                "step {step}: nothing in its {} samples counts in the loss; step skipped",
                self.config.training().global_batch_size
            ),
        };
        self.observer.notice(&text);
    }

    /// Reads this rank's microbatches of the next program, and sets in the plans which of its steps have a loss.
    fn load_batches(&mut self) -> Result<(), TrainError> {
        let local_batch_size = self.config.training().local_batch_size;
        let context = self.executor.ranks().context_rank();
        let samples_per_step = self.config.training().global_batch_size as u64;
        let mut announced_step = None;
        for index in 0..self.executor.program().header.num_microbatches {
            let microbatch = self.executor.global_microbatch(index);
            let offset = (microbatch * local_batch_size) as u64;
            let first = self.state.next_sample + offset;
            let step = offset / samples_per_step;
            if announced_step.replace(step) != Some(step) {
                let step_first = self.state.next_sample + step * samples_per_step;
                self.step_plans[step as usize].has_loss =
                    self.train.announce_samples(step_first, samples_per_step)?;
            }
            self.batches.push(read_batch(
                &mut *self.train,
                self.executor.device(),
                &mut self.host_batch,
                first,
                context,
            )?);
        }
        Ok(())
    }
}
