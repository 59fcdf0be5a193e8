//! Accessors of [`Executor`].

use super::{ActionTime, Executor};
use crate::error::Result;
use crate::layout::{Placements, RankGrid};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Instant;
use trireme_codec::{Compression, Compressor};
use trireme_comm::Group;
use trireme_model::{Model, ModelProfile};
use trireme_optim::{LossScaler, Optimizer};
use trireme_schedule::Program;
use trireme_tensor::{Device, Fp8State, View, ViewMut};

impl Executor {
    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The shapes, memory and costs of the model's passes.
    pub fn profile(&self) -> &ModelProfile {
        &self.profile
    }

    /// The device that this rank computes on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The host of the device. Its memory stores state that resides off the device, and state on disk passes through it.
    pub fn host(&self) -> &Device {
        &self.offload.options.host
    }

    /// Peak bytes of host memory: for state off the device, and for exchanges if kernels cannot access host memory.
    pub fn host_bytes_peak(&self) -> usize {
        let (device, host) = (self.device(), self.host());
        let state = if host.is_same(device) { 0 } else { host.memory().total().peak };
        let staging = if device.reaches_host() { 0 } else { device.staging().total().peak };
        state + staging
    }

    /// The group of all ranks.
    pub fn group(&self) -> &Group {
        self.ranks.world()
    }

    /// The ranks, as a grid with the groups of each axis.
    pub fn ranks(&self) -> &RankGrid {
        &self.ranks
    }

    /// The step program.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// The times of the actions of the last step, in program order; up to a failure, if there was one. Empty if all steps were skipped
    /// because nothing counted in the loss.
    pub fn timeline(&self) -> &[ActionTime] {
        &self.timeline.actions
    }

    /// Sets whether the following steps record when the kernels of each action ran on a GPU, for
    /// [`kernel_intervals`](Executor::kernel_intervals). Each such step first waits for pending kernels, and each action records two
    /// events.
    pub fn record_kernel_times(&mut self, is_enabled: bool) {
        self.timeline.kernels.is_enabled = is_enabled;
    }

    /// Returns the times at which the kernels of each action of the last step began and ended, on the host's clock. Empty if they were
    /// [not recorded](Executor::record_kernel_times), or if the device is not a GPU. Blocks until they have run.
    ///
    /// # Errors
    /// If the device has failed.
    pub fn kernel_intervals(&self) -> Result<Vec<[Instant; 2]>> {
        self.timeline.kernels.intervals()
    }

    /// The metrics that units reported in a step of the last program: names, and means over all ranks.
    pub fn metrics(&self, step: usize) -> impl Iterator<Item = (&'static str, f64)> {
        self.reports.metrics(step)
    }

    /// Bits with which this rank requests actions from all ranks at the end of a step. The caller defines their meaning. They are sent with
    /// the losses of a step, in 8 bytes per rank, so all ranks see them after the same step. A bit that is set after the rank has computed
    /// its last loss is sent in the next step.
    pub fn requests(&self) -> Arc<AtomicU32> {
        Arc::clone(&self.reports.requests)
    }

    /// The bits that any rank had set in [`requests`](Executor::requests) in the last program; the same on all ranks.
    pub fn requested(&self) -> u32 {
        self.reports.requested
    }

    /// The placements of parameters and optimizer state on the ranks that update them.
    pub fn placements(&self) -> &Placements {
        &self.placements
    }

    /// The elements of each unit's flat buffer that this rank updates.
    pub fn parts(&self) -> &[Range<usize>] {
        self.parameters.parts()
    }

    /// The device of [`shard`](Executor::shard).
    pub fn shard_device(&self) -> &Device {
        self.parameters.shard_device()
    }

    /// The device that stores the optimizer's state.
    pub fn optimizer_device(&self) -> &Device {
        &self.optimization.device
    }

    /// The elements of a unit's parameters that this rank updates, in [`parameter_dtype`](crate::ExecutorOptions::parameter_dtype): a
    /// one-dimensional view. They must be [in memory](Executor::fetch_state).
    pub fn shard(&self, unit: usize) -> View<'_> {
        self.parameters.shard(unit)
    }

    /// As [`shard`](Executor::shard), to write. Full copies that operations read do not change.
    pub fn shard_mut(&mut self, unit: usize) -> ViewMut<'_> {
        self.parameters.shard_mut(unit)
    }

    /// The optimizer with its state.
    pub fn optimizer(&self) -> &Optimizer {
        &self.optimization.optimizer
    }

    /// Mutable access to the optimizer, to [declare when its state began](Optimizer::set_state_start). Must be changed in the same way on
    /// all ranks.
    pub fn optimizer_mut(&mut self) -> &mut Optimizer {
        &mut self.optimization.optimizer
    }

    /// The loss scaler, with the current loss scale.
    pub fn loss_scaler(&self) -> &LossScaler {
        &self.optimization.loss_scaler
    }

    /// Mutable access to the loss scaler, to load its state. Must be changed in the same way on all ranks.
    pub fn loss_scaler_mut(&mut self) -> &mut LossScaler {
        &mut self.optimization.loss_scaler
    }

    /// The fp8 scales; `None` if the model does not use fp8.
    pub fn fp8_state(&self) -> Option<&Fp8State> {
        self.passes.fp8.as_ref().map(|fp8| &fp8.state)
    }

    /// Mutable access to the fp8 scales, to load them. Must be changed in the same way on all ranks.
    pub fn fp8_state_mut(&mut self) -> Option<&mut Fp8State> {
        self.passes.fp8.as_mut().map(|fp8| &mut fp8.state)
    }

    /// The compression of gradients, or of momentum.
    pub fn compression(&self) -> Compression {
        self.options.compression
    }

    /// The gradient norms of earlier steps by which the next steps clip, the newest last. Only layouts that update early and pipelines
    /// that do not drain between updates have them, and only if steps clip. They are part of the state that determines the next steps.
    pub fn earlier_norms(&self) -> Vec<f64> {
        let known = self.updates.iter().flat_map(|updates| &updates.norms.known);
        known.chain(&self.optimization.previous_norm).copied().collect()
    }

    /// Restores the [norms](Executor::earlier_norms) of an earlier run.
    pub fn restore_earlier_norms(&mut self, norms: &[f64]) {
        if let Some(updates) = &mut self.updates {
            updates.norms.restore(norms);
        } else if self.program.header.state.updates_early {
            self.optimization.previous_norm = norms.last().copied();
        }
    }

    /// The compressors of the units whose gradients are compressed, each with the unit's name.
    pub fn compressors(&self) -> impl Iterator<Item = (&str, &Compressor)> {
        self.gradients.compressors()
    }

    /// As [`compressors`](Executor::compressors), to load their state. State that is not specific to a rank must be the same on all ranks.
    pub fn compressors_mut(&mut self) -> impl Iterator<Item = (&str, &mut Compressor)> {
        self.gradients.compressors_mut()
    }
}
