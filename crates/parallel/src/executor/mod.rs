//! Runs step programs.

mod access;
mod asynchronous;
mod dry_run;
mod earlier_norms;
mod early_updates;
mod finishing;
mod fp8_scales;
mod generation;
mod hashes;
mod in_flight;
mod loading;
mod offloading;
mod parallelize;
mod passes;
mod pending_messages;
mod record_hashes;
mod relocation;
mod send_receive;
mod shard_exchange;
mod step_reports;
mod timeline;
mod updating;
mod validation;
mod versions;

pub use generation::Generation;
pub use hashes::StepHashes;
pub use parallelize::ExecutorSetup;
pub use timeline::ActionTime;
pub use validation::{ValidationBatches, ValidationRound};

use crate::axis::UnitAxes;
use crate::error::{ParallelError, Result};
use crate::gradients::{Gradients, SquaredNorms};
use crate::layout::{DenseAndExpert, Placements, RankGrid};
use crate::memory::{CountedMemory, WaitTracker};
use crate::offload::{OffloadOptions, OffloadStores};
use crate::parameters::{RankParameters, ReplicatedParameters};
use crate::step::{ExecutorOptions, StepOutcome, StepPlan};
use fp8_scales::SynchronizedScales;
use hashes::HashRecorder;
use in_flight::InFlight;
use pending_messages::PendingMessages;
use shard_exchange::ShardExchange;
use std::sync::Arc;
use step_reports::{StepReports, report_index};
use timeline::Timeline;
use trireme_comm::{CommError, ProgramLine};
use trireme_model::{Batch, Model, ModelProfile};
use trireme_optim::{LossScaler, Optimizer, StepSettings};
use trireme_schedule::{Action, Program};
use trireme_tensor::{Device, ParameterSource};
use versions::AsynchronousUpdates;

/// Runs step programs on one rank's part of a model.
///
/// [`Executor::new`] describes how each axis of the ranks is implemented.
pub struct Executor {
    model: Model,
    profile: ModelProfile,
    device: Device,
    ranks: Arc<RankGrid>,
    options: ExecutorOptions,
    program: Program,
    /// The program of evaluation and generation: forward passes without training.
    forward_program: Program,
    placements: Placements,
    parameters: RankParameters,
    gradients: Gradients,
    optimization: Optimization,
    offload: OffloadState,
    passes: Passes,
    messages: PendingMessages,
    reports: StepReports,
    /// `Some` for a pipeline that does not drain between updates.
    updates: Option<AsynchronousUpdates>,
    waiting: WaitTracker,
    /// The first failure of an operation that kernels waited for. All later operations fail with it.
    failure: Option<CommError>,
    timeline: Timeline,
    outcomes: Vec<StepOutcome>,
}

/// The optimizer, and what its updates need in addition to gradients and parameters.
struct Optimization {
    optimizer: Optimizer,
    /// The device that stores the optimizer's state and runs updates.
    device: Device,
    exchanges: DenseAndExpert<ShardExchange>,
    /// Parameters for which this rank computes only a partial gradient.
    partial_gradients: ReplicatedParameters,
    loss_scaler: LossScaler,
    squares: SquaredNorms,
    /// The gradient norm of the previous step, by which a step with early updates clips.
    previous_norm: Option<f64>,
    hashes: HashRecorder,
}

/// Offloaded state.
struct OffloadState {
    options: OffloadOptions,
    stores: OffloadStores,
    /// For each unit, whether this rank's shard of parameters was written since it was last evicted.
    changed: Vec<bool>,
    /// For each unit, whether the sum of squares of its gradient was computed, and the gradient evicted, in this step.
    is_squared: Vec<bool>,
}

/// The state of units' passes, and the axes along which they communicate.
struct Passes {
    axes: UnitAxes,
    fp8: Option<SynchronizedScales>,
    in_flight: InFlight,
    /// Counts the buffers of validations until the executor is dropped.
    validation_memory: Vec<CountedMemory>,
}

impl Executor {
    /// Returns the index of this rank's microbatch `index` among the microbatches of all ranks. If a program has several steps, the
    /// microbatches of earlier steps come first.
    ///
    /// If gradients are reduced once per step, a rank's microbatches are adjacent. If gradients are sharded, they are reduced over the
    /// ranks of the shards after each microbatch. Microbatches then alternate between these ranks, so that all sums still follow the
    /// canonical order.
    pub fn global_microbatch(&self, index: usize) -> usize {
        let place = report_index(&self.program.header, &self.ranks, self.ranks.data().rank(), index);
        place / self.ranks.context_rank().degree()
    }

    /// Runs the program once: a training step over this rank's microbatches, taken from `batches` in order. The program must have one step.
    ///
    /// With a dynamic loss scale, a step that overflows is skipped on all ranks: parameters and optimizer do not change, and the scale is
    /// halved. With any scale, a step is skipped if its plan says that nothing counts in its loss.
    ///
    /// # Errors
    /// [`ParallelError::NotFinite`] and [`ParallelError::LossScaleExhausted`], before anything is updated unless the layout updates early;
    /// [`ParallelError::TooFewMicrobatches`]; errors of the device, the model and the groups.
    ///
    /// # Panics
    /// If the program has several steps, or only forward passes.
    pub fn run(
        &mut self,
        plan: StepPlan,
        batches: &mut dyn ExactSizeIterator<Item = Batch>,
    ) -> Result<StepOutcome> {
        // The vector is kept, so that steps do not allocate.
        let mut outcomes = std::mem::take(&mut self.outcomes);
        let ran = self.run_steps(&[plan], batches, &mut outcomes);
        let outcome = outcomes.pop();
        self.outcomes = outcomes;
        ran.map(|()| outcome.expect("a program of one step has one outcome"))
    }

    /// Runs the program once, with one plan per step, and appends the outcome of each step to `outcomes`. Microbatches are taken step after
    /// step.
    ///
    /// # Errors
    /// As [`run`](Executor::run). If the pipeline does not drain, [`NotFinite`](ParallelError::NotFinite) may be returned after some
    /// updates.
    ///
    /// # Panics
    /// If the number of plans is not the number of steps, or if the program has only forward passes.
    pub fn run_steps(
        &mut self,
        plans: &[StepPlan],
        batches: &mut dyn ExactSizeIterator<Item = Batch>,
        outcomes: &mut Vec<StepOutcome>,
    ) -> Result<()> {
        self.run_observed(plans, batches, outcomes, &mut |_| ())
    }

    /// As [`run_steps`](Executor::run_steps). Calls `on_action_end` with the index of each action after it has run.
    fn run_observed(
        &mut self,
        plans: &[StepPlan],
        batches: &mut dyn ExactSizeIterator<Item = Batch>,
        outcomes: &mut Vec<StepOutcome>,
        on_action_end: &mut dyn FnMut(usize),
    ) -> Result<()> {
        assert!(self.program.header.state.is_trained(), "an executor that only runs forward does not train");
        assert_eq!(plans.len(), self.program.header.num_steps(), "each step has its plan");
        let expected = self.program.header.num_microbatches;
        if batches.len() < expected {
            return Err(ParallelError::TooFewMicrobatches { expected, found: batches.len() });
        }
        self.passes.in_flight.first_step = plans[0].step;
        if plans.iter().all(|plan| !plan.has_loss) {
            batches.take(expected).for_each(drop);
            return self.skip_steps(plans, outcomes);
        }
        for microbatch in 0..expected {
            let batch = batches.next().expect("they were counted");
            self.begin_microbatch(microbatch, batch)?;
        }
        self.passes.axes.choose_shadowed();
        self.device.reset_cost();
        self.timeline.begin(&self.device)?;
        let pipeline = self.ranks.pipeline();
        let pipeline_rank = (pipeline.world_size() > 1).then(|| pipeline.rank().0);
        let mut finished = None;
        for index in 0..self.program.actions.len() {
            let action = self.program.actions[index];
            // Lines count from 1, and the first line of a program's text lists sizes.
            let (step, line) = (plans[0].step, index + 2);
            self.ranks.set_line(ProgramLine { step, pipeline_rank, line, action: format_args!("{action}") });
            self.run_action(action, plans, &mut finished)
                .map_err(|error| error.at(format_args!("step {step}, line {line} ({})", action.words())))?;
            self.note_waits(action);
            self.timeline.end(&self.device, self.device.cost().product_operations);
            on_action_end(index);
        }
        self.ranks.forget_line();
        match finished {
            Some((outcome, _)) => outcomes.push(outcome),
            None if self.updates.is_some() => self.finish_steps(plans, outcomes)?,
            // With early updates, a step is checked after its updates.
            None => outcomes.push(self.finish_gradients(plans[0])?.0),
        }
        Ok(())
    }

    /// Counts waits within a pass, such as for exchanges along the tensor axis, as waiting instead of work in the timeline.
    fn note_waits(&mut self, action: Action) {
        let waited = self.waiting.waited;
        self.collect_waiting();
        if action.is_pass() {
            self.timeline.exclude_wait(self.waiting.waited - waited);
        }
    }

    /// Executes one action. The first update of a step sets `finished` to the outcome and the settings of all its updates.
    fn run_action(
        &mut self,
        action: Action,
        plans: &[StepPlan],
        finished: &mut Option<(StepOutcome, Option<StepSettings>)>,
    ) -> Result<()> {
        self.await_parameters(action)?;
        self.await_state(action)?;
        self.await_messages(action)?;
        self.timeline.start(&self.device);
        match action {
            Action::Forward { unit, microbatch, keep } => self.forward(unit, microbatch, keep)?,
            Action::Recompute { unit, microbatch } => self.recompute(unit, microbatch)?,
            Action::Backward { unit, microbatch } => self.backward(unit, microbatch)?,
            Action::BackwardInput { unit, microbatch } => self.backward_input(unit, microbatch)?,
            Action::BackwardWeight { unit, microbatch } => self.backward_weight(unit, microbatch)?,
            Action::Unshard { unit } => self.parameters.unshard(unit)?,
            Action::Reshard { unit } => self.parameters.reshard(unit),
            Action::ReduceGrad { unit } => {
                // If the pipeline does not drain, the gradient belongs to the unit's next update.
                let step = self.updates.as_ref().map_or(0, |updates| updates.units[unit].newest);
                self.reduce(unit, plans[step])?;
            }
            Action::UnshardGrad { unit } => self.gradients.gather(unit)?,
            Action::Send(message) => self.send_message(message)?,
            Action::Receive(message) => self.receive_message(message)?,
            Action::Fetch(state) => self.offload.stores.fetch(state)?,
            Action::Evict(state) => self.evict(state)?,
            Action::Stash { unit } => {
                let updates = self.updates.as_mut().expect("a valid program does not drain");
                updates.stash(unit, self.parameters.unit(unit), &self.device)?;
            }
            Action::Unstash { unit } => {
                self.updates.as_mut().expect("a valid program does not drain").unstash(unit);
            }
            Action::Step { unit } if self.updates.is_some() => self.update_asynchronously(unit, plans)?,
            Action::Step { unit } if self.program.header.state.updates_early => {
                self.update_early(unit, plans[0])?;
            }
            Action::Step { unit } => {
                let (_, update) = match *finished {
                    Some(finished) => finished,
                    None => *finished.insert(self.finish_gradients(plans[0])?),
                };
                match update {
                    Some(settings) => self.update(unit, plans[0].step, settings)?,
                    None => self.gradients.free_gathered(unit),
                }
            }
        }
        self.device.submit();
        Ok(())
    }

    /// Waits for the gathers of the parameters and gradients that an action reads.
    fn await_parameters(&mut self, action: Action) -> Result<()> {
        let Executor { program, parameters, gradients, waiting, .. } = self;
        if let Action::Step { unit } = action {
            gradients.await_gathered(unit, waiting)?;
        }
        match action {
            Action::Reshard { unit } | Action::Step { unit } | Action::Stash { unit } => {
                parameters.await_gathered_unit(unit, waiting)
            }
            _ => program
                .header
                .reads(action)
                .try_for_each(|unit| parameters.await_gathered_unit(unit, waiting)),
        }
    }
}
