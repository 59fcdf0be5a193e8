//! The reduction of a unit's gradient, and the update.
//!
//! If an optimizer exchanges momentum, each rank turns its own gradient into momentum before the reduction starts, so that momentum, like
//! gradients, is sent during backward. The gradients of the other ranks are not known at that time, so an overflow is found only in the
//! sums. The optimizer's state does not change before then, and the compressors are rolled back after an overflow.
//!
//! A unit whose compression would save nothing exchanges gradients in every step, which results in the same update.

use super::hashes::ParameterHasher;
use super::{Executor, Optimization};
use crate::error::{ParallelError, Result};
use crate::memory::{on_device, update_on_device};
use crate::parameters::round_part;
use crate::step::StepPlan;
use trireme_base::DType;
use trireme_codec::CodecName;
use trireme_optim::{ReducedQuantity, StepSettings, parameter_rounding_seed};
use trireme_tensor::{Category, CowTensor, ViewMut};

impl Executor {
    /// Returns the number of the update of this step, which does not count skipped steps. Bias corrections of moments depend on it.
    pub(super) fn update_number(&self, plan: StepPlan) -> u64 {
        plan.step - self.optimization.loss_scaler.skipped_steps()
    }

    /// Whether any unit of this rank exchanges momentum in the update with this number.
    pub(super) fn exchanges_momentum(&self, update_number: u64) -> bool {
        self.program.header.held().any(|unit| self.unit_exchanges_momentum(unit, update_number))
    }

    /// Whether any unit of any pipeline rank may exchange momentum in this update. If so, no rank reports a gradient norm.
    pub(super) fn may_exchange_momentum(&self, update_number: u64) -> bool {
        let mut units = 0..self.model.num_units();
        self.options.compression.codec() != CodecName::None
            && self.ranks.data().world_size() > 1
            && units.any(|unit| {
                self.optimization.optimizer.reduced_quantity(unit, update_number) == ReducedQuantity::Momentum
            })
    }

    fn unit_exchanges_momentum(&self, unit: usize, update_number: u64) -> bool {
        self.optimization.optimizer.reduced_quantity(unit, update_number) == ReducedQuantity::Momentum
            && self.gradients.is_compressed(unit)
    }

    /// Starts to reduce a unit's gradient, or its momentum. Discards the gradient if nothing counts in the step's loss.
    pub(super) fn reduce(&mut self, unit: usize, plan: StepPlan) -> Result<()> {
        if !plan.has_loss {
            self.gradients.discard(unit);
            return Ok(());
        }
        let step = self.update_number(plan);
        let is_momentum = self.unit_exchanges_momentum(unit, step);
        if self.optimization.partial_gradients.has(unit) {
            let Executor { optimization, gradients, waiting, .. } = self;
            optimization.partial_gradients.sum(unit, gradients.own_sum(unit), waiting)?;
        }
        if is_momentum {
            let settings = StepSettings { step, lr: plan.lr, grad_scale: 1.0 / self.gradient_divisor() };
            let Executor {
                optimization: Optimization { optimizer, device: on, .. }, gradients, device, ..
            } = self;
            update_on_device(gradients.own_sum(unit), device, on, Category::Communication, |own_sum| {
                optimizer.gradient_to_momentum(on, unit, own_sum, settings);
                Ok::<_, ParallelError>(())
            })?;
        }
        // If an optimizer exchanges momentum, it needs its gradients in full precision.
        let is_uncompressed = self.optimization.optimizer.exchanges_momentum() && !is_momentum;
        self.gradients.reduce(unit, is_uncompressed)
    }

    /// Updates a unit's parameters with its reduced gradient or momentum. `step` is the number in the schedule, which counts skipped
    /// steps.
    pub(super) fn update(&mut self, unit: usize, step: u64, settings: StepSettings) -> Result<()> {
        self.await_operations()?;
        let is_momentum = self.unit_exchanges_momentum(unit, settings.step);
        let Optimization { optimizer, device, exchanges, hashes, .. } = &mut self.optimization;
        let (exchange, device) = (exchanges.of_mut(&self.model.table().units()[unit]), &*device);
        let Executor { gradients, parameters, ranks, .. } = self;
        let category = Category::Communication;
        let sum = on_device(gradients.for_update(unit), gradients.update_device(unit), device, category)?;
        let sum = CowTensor::in_f32(device, sum.view(), category)?;
        let table = self.model.table();
        let rank = ranks.world().rank();
        let hasher = ParameterHasher { table, placements: &self.placements, rank };
        let mut hashes = hashes.of_step(step, table.parameters().len());
        if let Some(hashes) = &mut hashes {
            hasher.add_unit(&mut hashes.gradients, unit, sum.view(), &parameters.parts()[unit], device)?;
        }
        let (from, rounding_runs) = (parameters.shard_device().clone(), parameters.rounding_runs(unit));
        let mut update_in_f32 = |values: ViewMut<'_>| {
            if is_momentum {
                let grad_scale = 1.0 / ranks.data().world_size() as f64;
                let settings = StepSettings { grad_scale, ..settings };
                optimizer.step_from_momentum(device, unit, values, sum.view(), settings);
                return Ok(());
            }
            optimizer.step_unit(device, unit, values, sum.view(), settings, exchange)
        };
        update_on_device(parameters.shard_mut(unit), &from, device, category, |shard| {
            let Some(runs) = rounding_runs else { return update_in_f32(shard) };
            let mut values = device.empty(shard.shape(), DType::F32, category)?;
            device.convert(shard.as_view(), values.view_mut());
            update_in_f32(values.view_mut())?;
            let seed = parameter_rounding_seed(unit, settings.step);
            round_part(device, &runs, values.view(), seed, shard);
            Ok::<_, ParallelError>(())
        })?;
        drop(sum);
        if let Some(hashes) = hashes {
            let (values, part) = (parameters.shard(unit), &parameters.parts()[unit]);
            hasher.add_unit(&mut hashes.parameters, unit, values, part, &from)?;
        }
        self.gradients.free_gathered(unit);
        self.offload.changed[unit] = true;
        Ok(())
    }
}
