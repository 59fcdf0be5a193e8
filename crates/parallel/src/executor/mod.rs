//! Runs step programs.

mod asynchronous;
mod dry;
mod earlier_norms;
mod finishing;
mod generation;
mod hashing;
mod loading;
mod means;
mod messages;
mod moves;
mod passes;
mod relocation;
mod timeline;
mod updating;

use crate::axis::UnitAxes;
use crate::counted::Counted;
use crate::error::ParallelError;
use crate::exchange::ShardExchange;
use crate::fp8::AgreedScales;
use crate::gradients::Gradients;
use crate::hashes::HashRecorder;
use crate::holders::Holders;
use crate::offload::{OffloadOptions, Offloaded};
use crate::parameters::RankParameters;
use crate::placement::Placements;
use crate::ranks::RankGrid;
use crate::squares::Squares;
use crate::step::{ExecutorOptions, StepOutcome, StepPlan, ZeroPlusPlus};
use crate::waiting::Waiting;
use asynchronous::Updates;
pub use dry::MemoryUse;
pub use generation::Generation;
use means::{Means, report_place};
use messages::Messages;
use passes::InFlight;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use timeline::Timeline;
use trireme_codec::{Compression, Compressor};
use trireme_comm::{CommError, Group, ProgramLine};
use trireme_model::{Batch, Model, Rehearsal};
use trireme_optim::{LossScaler, LossScaling, Optimizer, OptimizerOptions, StepSettings};
use trireme_schedule::lowering::lay_out;
use trireme_schedule::{Action, Outline, Program, StateClass, single, validate};
use trireme_tensor::{Category, Device, Fp8State, ParameterSource, View, ViewMut};

pub use timeline::ActionTime;

/// One rank's share of a model: parameters, gradients and optimizer where it trains, and what runs its programs.
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
    optimizer: Optimizer,
    offload: OffloadOptions,
    /// Where the optimizer works.
    optimizer_device: Device,
    offloaded: Offloaded,
    /// For each unit: its shard of parameters was written since it was evicted.
    changed: Vec<bool>,
    /// For each unit: its gradient was summed before it left.
    is_squared: Vec<bool>,
    exchange: ShardExchange,
    /// For units with experts, where ranks have different ones.
    expert_exchange: Option<ShardExchange>,
    /// The ranks with which units exchange values.
    axes: UnitAxes,
    grad_terms: Holders<f32>,
    gradients: Gradients,
    in_flight: InFlight,
    messages: Messages,
    loss_scaler: LossScaler,
    fp8: Option<AgreedScales>,
    means: Means,
    /// Accounts for buffers that the executor has handed to its callers, until it ends.
    counted: Vec<Counted>,
    squares: Squares,
    /// Of a program that does not drain between updates.
    updates: Option<Updates>,
    /// The step of the program that runs, or its first one.
    first_step: u64,
    /// In this step, for parameters.
    waiting: Waiting,
    /// The first failure of an operation that kernels waited for; everything later fails with it.
    failure: Option<CommError>,
    timeline: Timeline,
    hashes: HashRecorder,
    /// Memory of the outcome of a single step.
    outcomes: Vec<StepOutcome>,
}

/// What an executor is made of.
pub struct ExecutorSetup<'a> {
    /// The model.
    pub model: Model,
    /// What passes over its microbatches are.
    pub rehearsal: Rehearsal,
    /// What updates this rank's [parts](Placements::parts) of the units.
    pub optimizer: &'a OptimizerOptions,
    /// All ranks.
    pub ranks: RankGrid,
    /// What this rank computes on.
    pub device: &'a Device,
    /// What this rank does in a step.
    pub program: Program,
    /// How steps are run.
    pub options: ExecutorOptions,
    /// What it takes to have state elsewhere than on the device.
    pub offload: &'a OffloadOptions,
}

/// How units run without training; proven.
fn forward_program(training: &Outline) -> Result<Program, ParallelError> {
    let program = lay_out(single::forward_only(training), training.state.forward_only());
    validate(&program, 1)?;
    Ok(program)
}

impl Executor {
    /// Proves the program and takes memory for parameters and the optimizer's state, which are zeros, and gradients; collective over the
    /// ranks.
    pub fn new(setup: ExecutorSetup<'_>) -> Result<Self, ParallelError> {
        let ExecutorSetup { model, rehearsal, optimizer, .. } = setup;
        let ExecutorSetup { mut ranks, device, program, options, offload, .. } = setup;
        // Without a pipeline microbatches run one after the other.
        let in_flight_max =
            if program.outline.stages.is_empty() { 1 } else { program.outline.num_microbatches };
        validate(&program, in_flight_max)?;
        let spared = options.zero_plus_plus;
        let (state, num_shards) = (program.outline.state, ranks.shards().world_size());
        assert!(num_shards == 1 || state.has_shards(), "{num_shards} shards of no state");
        if state.is_sharded(StateClass::Parameters) && num_shards > 1 && spared != ZeroPlusPlus::NONE {
            ranks.split_by_hosts()?;
        }
        let place = model.table().model_place();
        assert_eq!(place, ranks.model_place(), "the model's parts are those of this rank");
        ranks.split_holders(model.table())?;
        let updates = Updates::new(&program.outline, &mut ranks)?;
        let grad_terms = Holders::of_terms(model.table(), &rehearsal, &ranks, device);
        let ranks = Arc::new(ranks);
        let axes = UnitAxes::new(&ranks, device);
        let (table, outline) = (model.table(), &program.outline);
        let precision = (options.gather_precision(), spared);
        let shards_device = offload.device_of(&state, state.class_of_weights(), device);
        let placements = Placements::new(table, outline, ranks.mesh().clone());
        let parts = placements.parts(table, ranks.world().rank());
        let make = match state.moves(StateClass::Optimizer) {
            true => Optimizer::without_memory,
            false => Optimizer::new,
        };
        let optimizer_device = offload.device_of(&state, StateClass::Optimizer, device).clone();
        let stepped = if state.is_trained() { parts.clone() } else { vec![0..0; parts.len()] };
        let squares = Squares::new(table, &ranks, device, optimizer)?;
        let optimizer = make(optimizer, table, &stepped, &optimizer_device)?;
        let devices = (device, shards_device);
        let parameters = RankParameters::new((table, parts), outline, precision, &ranks, devices)?;
        let messages = Messages::new(&ranks, outline.num_microbatches, device);
        let devices = (device, offload.device_of(&state, StateClass::Gradients, device));
        device.staging().take_outside(Category::Communication, ranks.fixed_bytes())?;
        let mut gradients = Gradients::new(table, outline, &ranks, devices, messages.pool(), &options)?;
        if optimizer.exchanges_momentum() {
            gradients.expect_momentum(matches!(options.loss_scaling, LossScaling::Dynamic { .. }))?;
        }
        let exchange = ShardExchange::new(&ranks, ranks.state(), outline, &optimizer_device, device);
        let expert_exchange = ranks
            .expert_state()
            .map(|state| ShardExchange::new(&ranks, state, outline, &optimizer_device, device));
        let means = Means::new(outline, &ranks, &rehearsal, device)?;
        let fp8 =
            options.fp8.map(|recipe| AgreedScales::new(recipe, &model, device, ranks.world())).transpose()?;
        let forward = forward_program(outline)?;
        let mut executor = Executor {
            in_flight: InFlight::new(outline, &rehearsal),
            messages,
            offload: offload.clone(),
            optimizer_device,
            offloaded: Offloaded::new(offload, &program, device),
            changed: vec![true; outline.chain.num_units],
            is_squared: vec![false; outline.chain.num_units],
            timeline: Timeline::new(program.actions.len()),
            model,
            rehearsal,
            device: device.clone(),
            ranks,
            options,
            program,
            forward_program: forward,
            placements,
            parameters,
            optimizer,
            exchange,
            expert_exchange,
            axes,
            grad_terms,
            gradients,
            loss_scaler: LossScaler::new(options.loss_scaling),
            fp8,
            means,
            counted: Vec::new(),
            squares,
            updates,
            first_step: 0,
            waiting: Waiting::default(),
            failure: None,
            hashes: HashRecorder::default(),
            outcomes: Vec::with_capacity(1),
        };
        executor.expect_moves();
        executor.send_zeros()?;
        Ok(executor)
    }

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
        &self.offload.host
    }

    /// Bytes of the host's memory that have been in use at a time: of state that is not on the device, and, unless the device works in
    /// that memory, of what is exchanged with other ranks.
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

    /// When the actions of the last step ran, in the program's order; of a step that failed, those that ended. Empty if all steps of the
    /// program were skipped because nothing counted in their loss.
    pub fn timeline(&self) -> &[ActionTime] {
        self.timeline.actions()
    }

    /// The metrics that units reported in a step of the last program: names and means over all ranks.
    pub fn metrics(&self, step: usize) -> impl Iterator<Item = (&'static str, f64)> {
        self.means.metrics(step)
    }

    /// Bits by which each rank can ask all ranks for something at the end of a step. They travel with the losses of a step, in 8 bytes a
    /// rank, so that all ranks hear of them after the same step: those that were set when the rank had computed its last loss.
    pub fn requests(&self) -> Arc<AtomicU32> {
        self.means.requests()
    }

    /// The bits that any rank had set in [`requests`](Executor::requests) in the last program; the same on all ranks.
    pub fn requested(&self) -> u32 {
        self.means.requested()
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
        &self.optimizer_device
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
        &self.optimizer
    }

    /// The optimizer, to declare when its state began; alike on all ranks.
    pub fn optimizer_mut(&mut self) -> &mut Optimizer {
        &mut self.optimizer
    }

    /// The scale of the loss.
    pub fn loss_scaler(&self) -> &LossScaler {
        &self.loss_scaler
    }

    /// The scale of the loss, to load; alike on all ranks.
    pub fn loss_scaler_mut(&mut self) -> &mut LossScaler {
        &mut self.loss_scaler
    }

    /// The scales of fp8, if the model works in it.
    pub fn fp8_state(&self) -> Option<&Fp8State> {
        self.fp8.as_ref().map(AgreedScales::state)
    }

    /// The scales of fp8, to load; alike on all ranks.
    pub fn fp8_state_mut(&mut self) -> Option<&mut Fp8State> {
        self.fp8.as_mut().map(AgreedScales::state_mut)
    }

    /// How gradients, or momentum in their place, are compressed.
    pub fn compression(&self) -> Compression {
        self.options.compression
    }

    /// The norms that the next steps clip by, the newest last, in a pipeline that does not drain between updates and has clipped; they are part of what determines these steps.
    pub fn earlier_norms(&self) -> Vec<f64> {
        self.updates.iter().flat_map(|updates| updates.norms.known()).collect()
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
    ) -> Result<StepOutcome, ParallelError> {
        // Steps allocate nothing.
        let mut outcomes = std::mem::take(&mut self.outcomes);
        let ran = self.run_steps(&[plan], batches, &mut outcomes);
        let outcome = outcomes.pop();
        self.outcomes = outcomes;
        ran.map(|()| outcome.expect("a program of one step has one outcome"))
    }

    /// Runs the program once, for all of its steps, which `plans` are for, and adds what each has come to to `outcomes`.
    /// Microbatches are those of one step after the other.
    ///
    /// # Errors
    /// As those of [`run`](Executor::run); of a pipeline that does not drain between updates
    /// [`ParallelError::NotFinite`] when some of these are done.
    ///
    /// # Panics
    /// If there is not a plan for each step.
    pub fn run_steps(
        &mut self,
        plans: &[StepPlan],
        batches: &mut dyn ExactSizeIterator<Item = Batch>,
        outcomes: &mut Vec<StepOutcome>,
    ) -> Result<(), ParallelError> {
        self.run_observed(plans, batches, outcomes, &mut |_| ())
    }

    /// As [`run_steps`](Executor::run_steps); `see` is told the index of each action that has ended.
    fn run_observed(
        &mut self,
        plans: &[StepPlan],
        batches: &mut dyn ExactSizeIterator<Item = Batch>,
        outcomes: &mut Vec<StepOutcome>,
        see: &mut dyn FnMut(usize),
    ) -> Result<(), ParallelError> {
        assert!(self.program.outline.state.is_trained(), "an executor that only runs forward does not train");
        assert_eq!(plans.len(), self.program.outline.num_steps(), "each step has its plan");
        let expected = self.program.outline.num_microbatches;
        if batches.len() < expected {
            return Err(ParallelError::TooFewMicrobatches { expected, found: batches.len() });
        }
        self.first_step = plans[0].step;
        if plans.iter().all(|plan| !plan.has_loss) {
            batches.take(expected).for_each(drop);
            return self.skip_steps(plans, outcomes);
        }
        for microbatch in 0..expected {
            let batch = batches.next().expect("they were counted");
            self.begin_microbatch(microbatch, batch)?;
        }
        self.axes.choose_shadowed();
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
        let waited = self.waiting.total();
        self.collect_waiting();
        if action.is_pass() {
            self.timeline.has_waited(self.waiting.total() - waited);
        }
    }

    /// Does one thing of a step. What its end has come to is `finished` from the first update on.
    fn act(
        &mut self,
        action: Action,
        plans: &[StepPlan],
        finished: &mut Option<(StepOutcome, Option<StepSettings>)>,
    ) -> Result<(), ParallelError> {
        self.await_parameters(action)?;
        self.await_state(action)?;
        self.await_messages(action)?;
        self.timeline.start();
        match action {
            Action::Forward { unit, microbatch, keep } => self.forward(unit, microbatch, keep),
            Action::Recompute { unit, microbatch } => self.recompute(unit, microbatch),
            Action::Backward { unit, microbatch } => self.backward(unit, microbatch),
            Action::BackwardInput { unit, microbatch } => self.backward_input(unit, microbatch),
            Action::BackwardWeight { unit, microbatch } => self.backward_weight(unit, microbatch),
            Action::Unshard { unit } => self.parameters.unshard(unit),
            Action::Reshard { unit } => {
                self.parameters.reshard(unit);
                Ok(())
            }
            Action::ReduceGrad { unit } => {
                // Of a program without drains, the step whose update comes next.
                let step = self.updates.as_ref().map_or(0, |updates| updates.num_updates(unit));
                self.reduce(unit, plans[step])
            }
            Action::UnshardGrad { unit } => self.gradients.gather(unit),
            Action::Send(message) => self.send_message(message),
            Action::Receive(message) => self.receive_message(message),
            Action::Fetch(state) => self.offloaded.fetch(state),
            Action::Evict(state) => self.evict(state),
            Action::Stash { unit } => {
                let updates = self.updates.as_mut().expect("a valid program does not drain");
                updates.stash(unit, self.parameters.unit(unit), &self.device)
            }
            Action::Unstash { unit } => {
                self.updates.as_mut().expect("a valid program does not drain").unstash(unit);
                Ok(())
            }
            Action::Step { unit } if self.updates.is_some() => self.step_ahead(unit, plans),
            Action::Step { unit } => {
                let (_, update) = match *finished {
                    Some(finished) => finished,
                    None => *finished.insert(self.finish_gradients(plans[0])?),
                };
                match update {
                    Some(settings) => self.update(unit, plans[0].step, settings),
                    None => {
                        self.gradients.free_gathered(unit);
                        Ok(())
                    }
                }
            }
        }
    }

    /// Waits for the parameters and gathered gradients that an action works with.
    fn await_parameters(&mut self, action: Action) -> Result<(), ParallelError> {
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
