//! Passes of units: forward, recomputation and backward in training; forward in evaluation and generation.

use super::in_flight::{Kept, Purpose, Reports, check_batch, num_samples};
use super::versions::PassParameters;
use super::{Executor, InFlight, ValidationBatches};
use crate::error::{ParallelError, Result};
use crate::memory::CountedMemory;
use std::sync::Arc;
use trireme_base::DType;
use trireme_comm::Buffer;
use trireme_model::{Batch, Bundle, UnitPass};
use trireme_schedule::{Keep, MessageKind};
use trireme_tensor::tape::{Metric, Randomness, Recording, RowMean};
use trireme_tensor::{Category, PassState, Tape, Tensor};

impl Executor {
    pub(super) fn begin_microbatch(&mut self, microbatch: usize, batch: Batch) -> Result<()> {
        check_batch(&batch, &self.profile, self.profile.num_samples())?;
        self.passes.in_flight.begin(microbatch, batch, &self.program.header, &self.profile);
        Ok(())
    }

    pub(super) fn forward(&mut self, unit: usize, microbatch: usize, keep: Keep) -> Result<()> {
        let mut inputs = self.passes.in_flight.take(MessageKind::Activation, microbatch);
        let is_last = unit + 1 == self.program.header.chain.num_units;
        if is_last && let Purpose::Generation(kv_cache) = &self.passes.in_flight.purpose {
            kv_cache.keep_last_rows(&mut inputs)?;
        }
        if let Some(updates) = &mut self.updates {
            updates.begin_forward(unit, microbatch, &self.program.header);
        }
        let mut pass = self.record(unit, microbatch, inputs)?;
        match &mut self.passes.in_flight.purpose {
            Purpose::Training => (),
            Purpose::Generation(_) => return Ok(()),
            Purpose::Evaluation(Reports { sums, num_rows }) => {
                let reports = self.profile.reports().enumerate().filter(|(_, (own, _))| *own == unit);
                for (place, (_, report)) in reports {
                    let Some(mean) = pass.reported(report.metric) else { continue };
                    let sum = sums.view_mut().into_part(place, [1].into());
                    self.device.copy(mean.sum.view(), sum);
                    num_rows[place] = mean.num_rows;
                }
                return Ok(());
            }
        }
        for Metric { name, mean } in pass.metrics() {
            self.reports.push(unit, Some(name), microbatch, mean);
        }
        let kept = match keep {
            Keep::All => Some(Kept::Recorded(pass)),
            Keep::Products => {
                pass.keep_products();
                Some(Kept::Recorded(pass))
            }
            Keep::Input | Keep::Nothing => {
                let inputs = pass.take_inputs();
                self.passes.in_flight.spare_tapes.push(pass.into_tape());
                (keep == Keep::Input).then_some(Kept::Input(inputs))
            }
        };
        *self.passes.in_flight.kept_slot(unit, microbatch) = kept;
        Ok(())
    }

    /// Runs a unit's forward on a tape of its own, and passes its outputs on to the next unit.
    fn record(&mut self, unit: usize, microbatch: usize, inputs: Bundle<Tensor>) -> Result<UnitPass> {
        let pass = self.pass_state(microbatch);
        let tape = match self.passes.in_flight.purpose {
            Purpose::Training => match self.passes.in_flight.spare_tapes.pop() {
                Some(tape) => tape.for_pass(pass),
                None => Tape::new(&self.device, Recording::On, pass),
            },
            Purpose::Evaluation(_) | Purpose::Generation(_) => Tape::new(&self.device, Recording::Off, pass),
        };
        let parameters = PassParameters::new(&self.parameters, self.updates.as_ref(), unit, microbatch);
        let InFlight { purpose, batches, .. } = &mut self.passes.in_flight;
        let kv_cache = if let Purpose::Generation(past) = purpose { Some(past) } else { None };
        let (unit, batch) = (self.model.unit(unit), &mut batches[microbatch]);
        let (pass, outputs) = UnitPass::forward(unit, tape, &parameters, inputs, batch, kv_cache)?;
        *self.passes.in_flight.between_units_slot(MessageKind::Activation, microbatch) = Some(outputs);
        Ok(pass)
    }

    /// Returns the key of random operations in a microbatch. It is the same for any layout.
    fn randomness(&self, microbatch: usize) -> Randomness {
        let per_step = self.program.header.microbatches_per_step();
        let step = self.passes.in_flight.first_step + (microbatch / per_step) as u64;
        let global = self.global_microbatch(microbatch) % (per_step * self.ranks.sample_rank().degree);
        let num_samples = self.profile.num_samples();
        let first_sample = (global * num_samples) as u64;
        Randomness { seed: self.options.seed, step, first_sample, num_samples }
    }

    /// Recomputes the activations that forward did not keep.
    pub(super) fn recompute(&mut self, unit: usize, microbatch: usize) -> Result<()> {
        let inputs = match self.passes.in_flight.kept_slot(unit, microbatch).take() {
            Some(Kept::Recorded(mut pass)) => {
                let parameters =
                    PassParameters::new(&self.parameters, self.updates.as_ref(), unit, microbatch);
                pass.recompute(&parameters, &mut self.passes.in_flight.batches[microbatch])?;
                *self.passes.in_flight.kept_slot(unit, microbatch) = Some(Kept::Recorded(pass));
                return Ok(());
            }
            Some(Kept::Input(inputs)) => inputs,
            Some(Kept::InputHalfDone(_)) => unreachable!("a pass is recomputed before its backward"),
            // The first unit reads only the batch.
            None if unit == 0 => Bundle::new(),
            None => self.passes.in_flight.take(MessageKind::Activation, microbatch),
        };
        let pass = self.record(unit, microbatch, inputs)?;
        *self.passes.in_flight.kept_slot(unit, microbatch) = Some(Kept::Recorded(pass));
        Ok(())
    }

    pub(super) fn backward(&mut self, unit: usize, microbatch: usize) -> Result<()> {
        self.gradients.prepare(unit, microbatch)?;
        let (mut pass, grads) = self.begin_backward(unit, microbatch);
        let parameters = PassParameters::new(&self.parameters, self.updates.as_ref(), unit, microbatch);
        let batch = &mut self.passes.in_flight.batches[microbatch];
        pass.backward(&parameters, grads, batch, &mut self.gradients)?;
        self.store_input_grads(&mut pass, unit, microbatch)?;
        self.end_backward(pass, unit, microbatch);
        Ok(())
    }

    /// Runs the input half of backward: computes the gradient of a unit's input. [`backward_weight`](Executor::backward_weight) runs the
    /// weight half.
    pub(super) fn backward_input(&mut self, unit: usize, microbatch: usize) -> Result<()> {
        let (mut pass, grads) = self.begin_backward(unit, microbatch);
        let parameters = PassParameters::new(&self.parameters, self.updates.as_ref(), unit, microbatch);
        pass.backward_input(&parameters, grads, &mut self.passes.in_flight.batches[microbatch])?;
        self.store_input_grads(&mut pass, unit, microbatch)?;
        *self.passes.in_flight.kept_slot(unit, microbatch) = Some(Kept::InputHalfDone(pass));
        Ok(())
    }

    pub(super) fn backward_weight(&mut self, unit: usize, microbatch: usize) -> Result<()> {
        self.gradients.prepare(unit, microbatch)?;
        let Some(Kept::InputHalfDone(mut pass)) = self.passes.in_flight.kept_slot(unit, microbatch).take()
        else {
            unreachable!("the input half has run");
        };
        let parameters = PassParameters::new(&self.parameters, self.updates.as_ref(), unit, microbatch);
        pass.backward_weight(
            &parameters,
            &mut self.passes.in_flight.batches[microbatch],
            &mut self.gradients,
        )?;
        self.end_backward(pass, unit, microbatch);
        Ok(())
    }

    /// Takes a unit's forward pass, and the gradients of its outputs.
    fn begin_backward(&mut self, unit: usize, microbatch: usize) -> (UnitPass, Bundle<Tensor>) {
        let is_last = unit + 1 == self.program.header.chain.num_units;
        let in_flight = &mut self.passes.in_flight;
        let Some(Kept::Recorded(pass)) = in_flight.kept_slot(unit, microbatch).take() else {
            unreachable!("forward or a recomputation has recorded a pass");
        };
        // Frees the outputs of a recomputation: the next unit no longer needs them.
        *in_flight.between_units_slot(MessageKind::Activation, microbatch) = None;
        let grads = if is_last { Bundle::new() } else { in_flight.take(MessageKind::Gradient, microbatch) };
        (pass, grads)
    }

    /// Passes the gradients of a unit's inputs to the previous unit, and records the unit's loss.
    fn store_input_grads(&mut self, pass: &mut UnitPass, unit: usize, microbatch: usize) -> Result<()> {
        *self.passes.in_flight.between_units_slot(MessageKind::Gradient, microbatch) =
            Some(pass.take_input_grads()?);
        if let Some(loss) = pass.loss() {
            // The last loss may send all reports, so that they do not wait behind the reductions of gradients.
            self.reports.push(unit, None, microbatch, loss);
        }
        Ok(())
    }

    fn end_backward(&mut self, pass: UnitPass, unit: usize, microbatch: usize) {
        self.passes.in_flight.spare_tapes.push(pass.into_tape());
        self.passes.in_flight.release_batch_tensors(unit, microbatch, &self.profile);
        self.gradients.close(unit);
    }

    /// Allocates a buffer of the [group of all ranks](Executor::group) for the reports of a validation: for each batch, the sum and the
    /// number of rows of each [report](trireme_model::ModelProfile::reports). It is counted as communication until the executor is dropped.
    ///
    /// # Errors
    /// If there is no memory for it.
    pub fn allocate_validation_reports(&mut self, batches: &ValidationBatches) -> Result<Buffer<f64>> {
        let len = batches.num_batches() * 2 * self.profile.reports().count();
        let group = self.ranks.world();
        let counted = CountedMemory::new(&self.device);
        counted.charge_buffer(group, len * size_of::<f64>())?;
        self.passes.validation_memory.push(counted);
        Ok(group.buffer(len)?)
    }

    /// Evaluates a batch without training. Returns the [reports](trireme_model::ModelProfile::reports) of all units in order. The reports
    /// of units on other pipeline ranks are zeros. The batch may have fewer samples than a microbatch.
    ///
    /// Collective over the ranks of a pipeline, which pass the same batch. If parameters are sharded, collective over the ranks of the
    /// shards: a rank with `None` only takes part in the gathers. If ranks have different experts, all of them need a batch.
    ///
    /// # Errors
    /// Errors of the device, the groups and disks; [`ParallelError::BatchMismatch`]; [`ParallelError::NoBatch`].
    pub fn evaluate(&mut self, batch: Option<Batch>) -> Result<Vec<RowMean>> {
        match &batch {
            Some(batch) => check_batch(batch, &self.profile, num_samples(batch))?,
            None if self.ranks.experts().is_some() => return Err(ParallelError::NoBatch),
            None => {}
        }
        self.evaluate_checked(batch)
    }

    /// As [`evaluate`](Executor::evaluate), for samples that may have fewer positions than a microbatch.
    ///
    /// # Errors
    /// Errors of the device, the groups and disks.
    ///
    /// # Panics
    /// If there are several ranks.
    pub fn evaluate_sequences(&mut self, batch: Batch) -> Result<Vec<RowMean>> {
        assert_eq!(self.group().world_size(), 1, "others would not know of the positions");
        self.evaluate_checked(Some(batch))
    }

    fn evaluate_checked(&mut self, batch: Option<Batch>) -> Result<Vec<RowMean>> {
        let num_reports = self.profile.reports().count();
        let sums = self.device.zeros([num_reports].into(), DType::F64, Category::Activations)?;
        let reports = Reports { sums, num_rows: vec![0; num_reports] };
        let (Purpose::Evaluation(Reports { sums, num_rows }), _) =
            self.run_forward(Purpose::Evaluation(reports), batch)?
        else {
            unreachable!("an evaluation stays one")
        };
        let sums: Vec<f64> = self.device.read(sums.view())?;
        let means = sums.into_iter().zip(num_rows);
        Ok(means.map(|(sum, num_rows)| RowMean { sum, num_rows }).collect())
    }

    /// Runs the units without training. Returns the purpose with its collected results, and the outputs of the last unit on this rank.
    pub(super) fn run_forward(
        &mut self,
        purpose: Purpose,
        batch: Option<Batch>,
    ) -> Result<(Purpose, Option<Bundle<Tensor>>)> {
        self.passes.in_flight.purpose = purpose;
        std::mem::swap(&mut self.program, &mut self.forward_program);
        let ran = self.outside_step(|executor| executor.run_forward_program(batch));
        std::mem::swap(&mut self.program, &mut self.forward_program);
        let outputs = self.passes.in_flight.between_units_slot(MessageKind::Activation, 0).take();
        self.passes.in_flight.batches[0] = Batch::new();
        let purpose = std::mem::replace(&mut self.passes.in_flight.purpose, Purpose::Training);
        ran.map(|()| (purpose, outputs))
    }

    fn run_forward_program(&mut self, batch: Option<Batch>) -> Result<()> {
        let has_batch = batch.is_some();
        if let Some(batch) = batch {
            self.passes.in_flight.begin(0, batch, &self.program.header, &self.profile);
        }
        for index in 0..self.program.actions.len() {
            let action = self.program.actions[index];
            if has_batch || action.microbatch().is_none() {
                self.run_action(action, &[], &mut None)?;
            } else {
                // A rank without a batch awaits gathers in the same order as the ranks with a batch.
                self.await_parameters(action)?;
                self.await_state(action)?;
            }
        }
        self.messages.finish_until(0, &mut self.waiting)
    }

    /// Returns the precision, axes and random key of a unit's pass over a microbatch.
    fn pass_state(&self, microbatch: usize) -> PassState {
        let continues = matches!(self.passes.in_flight.purpose, Purpose::Generation(_));
        let pass = PassState {
            fp8: self.passes.fp8.as_ref().map(|fp8| Arc::clone(fp8.state.scales())),
            axes: self.passes.axes.of_pass(self.options.shards_rows, continues),
            ..self.options.precision.into()
        };
        match &self.passes.in_flight.purpose {
            Purpose::Evaluation(_) => pass,
            Purpose::Generation(kv_cache) => PassState { first_position: kv_cache.position(), ..pass },
            Purpose::Training => PassState {
                loss_scale: self.optimization.loss_scaler.scale() as f32,
                randomness: self.randomness(microbatch),
                ..pass
            },
        }
    }
}
