//! Runs step programs.

mod access;
mod asynchronous;
mod dry;
mod earlier_norms;
mod finishing;
mod fp8_scales;
mod generation;
mod hashes;
mod hashing;
mod in_flight;
mod loading;
mod means;
mod moves;
mod parallelize;
mod passes;
mod pending_messages;
mod relocation;
mod send_receive;
mod shard_exchange;
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
use crate::gradients::{Gradients, Squares};
use crate::layout::{PerExperts, Placements, RankGrid};
use crate::memory::{Counted, Waiting};
use crate::offload::{OffloadOptions, Offloaded};
use crate::parameters::{Holders, RankParameters};
use crate::step::{ExecutorOptions, StepOutcome, StepPlan};
use fp8_scales::AgreedScales;
use hashes::HashRecorder;
use in_flight::InFlight;
use means::{Means, report_place};
use pending_messages::Messages;
use shard_exchange::ShardExchange;
use std::sync::Arc;
use timeline::Timeline;
use trireme_comm::{CommError, ProgramLine};
use trireme_model::{Batch, Model, Rehearsal};
use trireme_optim::{LossScaler, Optimizer, StepSettings};
use trireme_schedule::{Action, Program};
use trireme_tensor::{Device, ParameterSource};
use versions::Updates;

/// Runs step programs on one rank's part of a model.
///
/// [`Executor::new`] says what each axis of the ranks contributes.
pub struct Executor {
    model: Model,
    rehearsal: Rehearsal,
    device: Device,
    ranks: Arc<RankGrid>,
    options: ExecutorOptions,
    program: Program,
    /// How units run without training.
    forward_program: Program,
    placements: Placements,
    parameters: RankParameters,
    gradients: Gradients,
    optimization: Optimization,
    moves: Moves,
    passes: Passes,
    messages: Messages,
    means: Means,
    /// Of a program that does not drain between updates.
    updates: Option<Updates>,
    waiting: Waiting,
    /// The first failure of an operation that kernels waited for; everything later fails with it.
    failure: Option<CommError>,
    timeline: Timeline,
    outcomes: Vec<StepOutcome>,
}

/// The optimizer, and what its updates need in addition to gradients and parameters.
struct Optimization {
    optimizer: Optimizer,
    /// The device that stores its state, and that it works on.
    device: Device,
    exchanges: PerExperts<ShardExchange>,
    /// Parameters of whose gradients this rank computes a partial sum only.
    grad_terms: Holders,
    loss_scaler: LossScaler,
    squares: Squares,
    hashes: HashRecorder,
}

/// Offloaded state.
struct Moves {
    options: OffloadOptions,
    offloaded: Offloaded,
    /// For each unit: its shard of parameters was written since it was evicted.
    changed: Vec<bool>,
    /// For each unit: its gradient was summed before it left.
    is_squared: Vec<bool>,
}

/// The context of units' passes.
struct Passes {
    axes: UnitAxes,
    fp8: Option<AgreedScales>,
    in_flight: InFlight,
    /// Accounts for buffers of validations until the executor ends.
    validation_memory: Vec<Counted>,
}

impl Executor {
    /// The place among all microbatches of a step of this rank's microbatch `index`.
    ///
    /// Ranks that reduce gradients once a step have neighbouring microbatches. Where shards are reduced after each one, the
    /// shards' ranks take turns, so that sums over them come first and the order of all sums stays the same.
    pub fn global_microbatch(&self, index: usize) -> usize {
        let place = report_place(&self.program.outline, &self.ranks, self.ranks.data().rank(), index);
        place / self.ranks.context_place().degree()
    }

    /// Runs the program once: a training step over this rank's microbatches, taken from `batches` in order.
    ///
    /// With a dynamic loss scale, a step that overflows is skipped on all ranks: it leaves parameters and optimizer as
    /// they are, and halves the scale. A step whose plan says that nothing counts in its loss is skipped with any scale.
    ///
    /// # Errors
    /// [`ParallelError::NotFinite`] and [`ParallelError::LossScaleExhausted`] before anything is updated; and what device,
    /// model and group refuse.
    pub fn run(
        &mut self,
        plan: StepPlan,
        batches: &mut dyn ExactSizeIterator<Item = Batch>,
    ) -> Result<StepOutcome> {
        // Steps allocate nothing.
        let mut outcomes = std::mem::take(&mut self.outcomes);
        let ran = self.run_steps(&[plan], batches, &mut outcomes);
        let outcome = outcomes.pop();
        self.outcomes = outcomes;
        ran.map(|()| outcome.expect("a program of one step has one outcome"))
    }

    /// Runs the program once, with a plan for each step, and adds their `outcomes`. Microbatches come step after step.
    ///
    /// # Errors
    /// As those of [`run`](Executor::run), but [`NotFinite`](ParallelError::NotFinite) after some updates if the pipeline does not
    /// drain.
    ///
    /// # Panics
    /// If there is not a plan for each step.
    pub fn run_steps(
        &mut self,
        plans: &[StepPlan],
        batches: &mut dyn ExactSizeIterator<Item = Batch>,
        outcomes: &mut Vec<StepOutcome>,
    ) -> Result<()> {
        self.run_observed(plans, batches, outcomes, &mut |_| ())
    }

    /// As [`run_steps`](Executor::run_steps); `see` is told the index of each action that has ended.
    fn run_observed(
        &mut self,
        plans: &[StepPlan],
        batches: &mut dyn ExactSizeIterator<Item = Batch>,
        outcomes: &mut Vec<StepOutcome>,
        see: &mut dyn FnMut(usize),
    ) -> Result<()> {
        assert!(self.program.outline.state.is_trained(), "an executor that only runs forward does not train");
        assert_eq!(plans.len(), self.program.outline.num_steps(), "each step has its plan");
        let expected = self.program.outline.num_microbatches;
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
        self.device.restart_cost();
        self.timeline.begin();
        let pipeline = self.ranks.pipeline();
        let pipeline_rank = (pipeline.world_size() > 1).then(|| pipeline.rank().0);
        let mut finished = None;
        for index in 0..self.program.actions.len() {
            let action = self.program.actions[index];
            // As in the program's text, which begins with a line of sizes.
            let (step, line) = (plans[0].step, index + 2);
            self.ranks.set_line(ProgramLine { step, pipeline_rank, line, action: format_args!("{action}") });
            self.act(action, plans, &mut finished)
                .map_err(|error| error.at(format_args!("step {step}, line {line} ({})", action.words())))?;
            self.note_waits(action);
            self.timeline.end(self.device.cost().product_operations);
            see(index);
        }
        self.ranks.forget_line();
        match finished {
            Some((outcome, _)) => outcomes.push(outcome),
            None => self.finish_steps(plans, outcomes)?,
        }
        Ok(())
    }

    /// Counts what a pass has waited for within its work, such as exchanges with ranks of the tensor axis, as waiting.
    fn note_waits(&mut self, action: Action) {
        let waited = self.waiting.waited;
        self.collect_waiting();
        if action.is_pass() {
            self.timeline.has_waited(self.waiting.waited - waited);
        }
    }

    /// Does one thing of a step. What its end has come to is `finished` from the first update on.
    fn act(
        &mut self,
        action: Action,
        plans: &[StepPlan],
        finished: &mut Option<(StepOutcome, Option<StepSettings>)>,
    ) -> Result<()> {
        self.await_parameters(action)?;
        self.await_state(action)?;
        self.await_messages(action)?;
        self.timeline.start();
        match action {
            Action::Forward { unit, microbatch, keep } => self.forward(unit, microbatch, keep)?,
            Action::Recompute { unit, microbatch } => self.recompute(unit, microbatch)?,
            Action::Backward { unit, microbatch } => self.backward(unit, microbatch)?,
            Action::BackwardInput { unit, microbatch } => self.backward_input(unit, microbatch)?,
            Action::BackwardWeight { unit, microbatch } => self.backward_weight(unit, microbatch)?,
            Action::Unshard { unit } => self.parameters.unshard(unit)?,
            Action::Reshard { unit } => self.parameters.reshard(unit),
            Action::ReduceGrad { unit } => {
                // Of a program without drains, the step whose update comes next.
                let step = self.updates.as_ref().map_or(0, |updates| updates.units[unit].newest);
                self.reduce(unit, plans[step])?;
            }
            Action::UnshardGrad { unit } => self.gradients.gather(unit)?,
            Action::Send(message) => self.send_message(message)?,
            Action::Receive(message) => self.receive_message(message)?,
            Action::Fetch(state) => self.moves.offloaded.fetch(state)?,
            Action::Evict(state) => self.evict(state)?,
            Action::Stash { unit } => {
                let updates = self.updates.as_mut().expect("a valid program does not drain");
                updates.stash(unit, self.parameters.unit(unit), &self.device)?;
            }
            Action::Unstash { unit } => {
                self.updates.as_mut().expect("a valid program does not drain").unstash(unit);
            }
            Action::Step { unit } if self.updates.is_some() => self.step_ahead(unit, plans)?,
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
        Ok(())
    }

    /// Waits for the parameters and gathered gradients that an action works with.
    fn await_parameters(&mut self, action: Action) -> Result<()> {
        let Executor { program, parameters, gradients, waiting, .. } = self;
        if let Action::Step { unit } = action {
            gradients.await_gathered(unit, waiting)?;
        }
        match action {
            Action::Reshard { unit } | Action::Step { unit } | Action::Stash { unit } => {
                parameters.ensure(unit, waiting)
            }
            _ => program.outline.reads(action).try_for_each(|unit| parameters.ensure(unit, waiting)),
        }
    }
}
