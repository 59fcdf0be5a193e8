//! Accessors of the executor.

use super::{ActionTime, Executor};
use crate::layout::{Placements, RankGrid};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use trireme_codec::{Compression, Compressor};
use trireme_comm::Group;
use trireme_model::{Model, Rehearsal};
use trireme_optim::{LossScaler, Optimizer};
use trireme_schedule::Program;
use trireme_tensor::{Device, Fp8State, View, ViewMut};

impl Executor {
    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// What passes over a microbatch are.
    pub fn rehearsal(&self) -> &Rehearsal {
        &self.rehearsal
    }

    /// The device that this rank computes on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The host beside it, in whose memory state lives that is not on the device, or passes through.
    pub fn host(&self) -> &Device {
        &self.moves.options.host
    }

    /// Peak bytes of the host's memory: of state that is not on the device, and of exchanges unless the device works there.
    pub fn host_bytes_peak(&self) -> usize {
        let (device, host) = (self.device(), self.host());
        let state = if host.is_same(device) { 0 } else { host.memory().total().peak };
        let staging = if device.reaches_host() { 0 } else { device.staging().total().peak };
        state + staging
    }

    /// All ranks.
    pub fn group(&self) -> &Group {
        self.ranks.world()
    }

    /// The ranks as a grid of replicas and shards.
    pub fn ranks(&self) -> &RankGrid {
        &self.ranks
    }

    /// The step program.
    pub fn program(&self) -> &Program {
        &self.program
    }

    /// When the actions of the last step ran, in the program's order, up to a failure. Empty if all steps were skipped for no loss.
    pub fn timeline(&self) -> &[ActionTime] {
        &self.timeline.actions
    }

    /// The metrics that units reported in a step of the last program: names and means over all ranks.
    pub fn metrics(&self, step: usize) -> impl Iterator<Item = (&'static str, f64)> {
        self.means.metrics(step)
    }

    /// Bits by which each rank can ask all ranks for something at the end of a step. They travel with the losses of a step, in 8 bytes a
    /// rank, so that all ranks hear of them after the same step: those that were set when the rank had computed its last loss.
    pub fn requests(&self) -> Arc<AtomicU32> {
        Arc::clone(&self.means.requests)
    }

    /// The bits that any rank had set in [`requests`](Executor::requests) in the last program; the same on all ranks.
    pub fn requested(&self) -> u32 {
        self.means.requested
    }

    /// Where parameters lie, as far as ranks update them.
    pub fn placements(&self) -> &Placements {
        &self.placements
    }

    /// The elements of each unit's flat buffer that this rank steps.
    pub fn parts(&self) -> &[Range<usize>] {
        self.parameters.parts()
    }

    /// The device that [`shard`](Executor::shard) lies on.
    pub fn shard_device(&self) -> &Device {
        self.parameters.shard_device()
    }

    /// The device that the optimizer's state lies on.
    pub fn optimizer_device(&self) -> &Device {
        &self.optimization.device
    }

    /// What this rank steps of a unit's parameters, in f32.
    pub fn shard(&self, unit: usize) -> View<'_> {
        self.parameters.shard(unit)
    }

    /// As [`shard`](Executor::shard), to write, where it is at hand; whole copies are as they were.
    pub fn shard_mut(&mut self, unit: usize) -> ViewMut<'_> {
        self.parameters.shard_mut(unit)
    }

    /// The optimizer with its state.
    pub fn optimizer(&self) -> &Optimizer {
        &self.optimization.optimizer
    }

    /// The optimizer, to declare when its state began; alike on all ranks.
    pub fn optimizer_mut(&mut self) -> &mut Optimizer {
        &mut self.optimization.optimizer
    }

    /// The scale of the loss.
    pub fn loss_scaler(&self) -> &LossScaler {
        &self.optimization.loss_scaler
    }

    /// The scale of the loss, to load; alike on all ranks.
    pub fn loss_scaler_mut(&mut self) -> &mut LossScaler {
        &mut self.optimization.loss_scaler
    }

    /// The scales of fp8, if the model works in it.
    pub fn fp8_state(&self) -> Option<&Fp8State> {
        self.passes.fp8.as_ref().map(|fp8| &fp8.state)
    }

    /// The scales of fp8, to load; alike on all ranks.
    pub fn fp8_state_mut(&mut self) -> Option<&mut Fp8State> {
        self.passes.fp8.as_mut().map(|fp8| &mut fp8.state)
    }

    /// How gradients, or momentum in their place, are compressed.
    pub fn compression(&self) -> Compression {
        self.options.compression
    }

    /// The norms that the next steps clip by, the newest last, in a pipeline that does not drain between updates and has clipped; they are part of what determines these steps.
    pub fn earlier_norms(&self) -> Vec<f64> {
        self.updates.iter().flat_map(|updates| &updates.norms.known).copied().collect()
    }

    /// Takes over the [norms](Executor::earlier_norms) of another run.
    pub fn restore_earlier_norms(&mut self, norms: &[f64]) {
        if let Some(updates) = &mut self.updates {
            updates.norms.restore(norms);
        }
    }

    /// The compressors of the units whose gradients are compressed, each with the unit's name.
    pub fn compressors(&self) -> impl Iterator<Item = (&str, &Compressor)> {
        self.gradients.compressors()
    }

    /// The same, to load; what is not a rank's own, alike on all ranks.
    pub fn compressors_mut(&mut self) -> impl Iterator<Item = (&str, &mut Compressor)> {
        self.gradients.compressors_mut()
    }
}
