//! The state after each action of a program.

mod prerequisites;

use super::{ActionFault, ProgramError};
use crate::action::{Action, Keep, Message, MessageKind, StateClass, StateKey};
use crate::program::ProgramHeader;
use std::collections::{BTreeSet, VecDeque};

/// The state of the activations that backward of a unit reads for one microbatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Activations {
    /// Forward has not run.
    Absent,
    /// Forward has kept a part of them.
    Kept(Keep),
    Complete,
    /// The input half of backward has run.
    Halved,
    /// Backward has run.
    Freed,
}

impl Activations {
    /// Returns whether the gradient of the unit's input has been computed.
    fn has_input_gradient(self) -> bool {
        matches!(self, Activations::Halved | Activations::Freed)
    }
}

/// The state of a unit's parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Parameters {
    Full,
    Sharded,
    /// The shard has been updated since the parameters were gathered.
    Stale,
}

struct UnitState {
    /// The state of the activations, by microbatch.
    activations: Vec<Activations>,
    parameters: Parameters,
    is_held: bool,
    /// Microbatches whose activations the unit holds.
    in_flight: usize,
    /// Microbatches that have added to the gradient.
    num_added: usize,
    /// Whether backward has added to the gradient since it was last reduced.
    has_unreduced: bool,
    /// Whether the full gradient has been gathered from its shards.
    has_gathered_grad: bool,
    /// Steps whose gradient has been reduced.
    num_reduced: usize,
    /// Steps whose update is done.
    num_stepped: usize,
    /// Versions of the parameters that are stashed, the oldest first, as the number of updates that produced them.
    stashed: VecDeque<usize>,
    /// The version that forward has read, by microbatch.
    version_read: Vec<usize>,
}

/// A tie of which at least one unit is on this rank of a pipeline.
struct Tie {
    reader: usize,
    owner: usize,
    is_across: bool,
}

impl Tie {
    fn of(header: &ProgramHeader) -> Option<Tie> {
        let is_here = |(reader, owner): &&(usize, usize)| header.holds(*reader) || header.holds(*owner);
        let &(reader, owner) =
            header.chain.ties.iter().find(is_here).filter(|_| !header.stages.is_empty())?;
        Some(Tie { reader, owner, is_across: header.rank_of(reader) != header.rank_of(owner) })
    }
}

/// The messages that were sent or received: a flag for each kind of message, unit and microbatch.
struct MessageLog {
    num_units: usize,
    num_microbatches: usize,
    flags: Vec<bool>,
}

impl MessageLog {
    fn new(header: &ProgramHeader) -> Self {
        let (num_units, num_microbatches) = (header.chain.num_units, header.num_microbatches);
        let flags = vec![false; MessageKind::ALL.len() * num_units * num_microbatches];
        MessageLog { num_units, num_microbatches, flags }
    }

    fn place(&self, Message { kind, unit, microbatch }: Message) -> usize {
        (kind as usize * self.num_units + unit) * self.num_microbatches + microbatch
    }

    fn contains(&self, message: Message) -> bool {
        self.flags[self.place(message)]
    }

    fn insert(&mut self, message: Message) {
        let place = self.place(message);
        self.flags[place] = true;
    }
}

pub(super) struct State<'a> {
    header: &'a ProgramHeader,
    microbatches_per_step: usize,
    units: Vec<UnitState>,
    /// The state of parameters at the start and at the end of the program.
    initial_parameters: Parameters,
    /// Whether gradients must be gathered for updates: they are sharded, but each rank updates all parameters.
    gathers_grads: bool,
    /// State that is evicted at this point of the program.
    evicted: BTreeSet<StateKey>,
    exchanged: MessageLog,
    /// The tie of two units, if it concerns this rank.
    tie: Option<Tie>,
}

impl<'a> State<'a> {
    pub(super) fn new(header: &'a ProgramHeader) -> Self {
        let initial_parameters = if header.state.is_sharded(StateClass::Parameters) {
            Parameters::Sharded
        } else {
            Parameters::Full
        };
        let unit = |unit| UnitState {
            activations: vec![Activations::Absent; header.num_microbatches],
            // A tied unit reads a copy of parameters that another rank holds.
            parameters: if header.holds(unit) { initial_parameters } else { Parameters::Full },
            is_held: header.holds(unit),
            in_flight: 0,
            num_added: 0,
            has_unreduced: false,
            has_gathered_grad: false,
            num_reduced: 0,
            num_stepped: 0,
            stashed: VecDeque::new(),
            version_read: vec![0; header.num_microbatches],
        };
        let mut evicted = BTreeSet::new();
        for class in [StateClass::Optimizer, StateClass::Parameters] {
            if header.state.is_fetched(class) {
                evicted.extend(header.held().map(|unit| StateKey { class, unit, microbatch: 0 }));
            }
        }
        let (units, exchanged) = ((0..header.chain.num_units).map(unit).collect(), MessageLog::new(header));
        // A program without microbatches has no action that uses this number.
        let microbatches_per_step = header.microbatches_per_step().max(1);
        let is_sharded = |class| header.state.is_sharded(class);
        let gathers_grads = is_sharded(StateClass::Gradients) && !is_sharded(StateClass::Optimizer);
        let tie = Tie::of(header);
        State {
            header,
            microbatches_per_step,
            units,
            initial_parameters,
            gathers_grads,
            evicted,
            exchanged,
            tie,
        }
    }

    pub(super) fn run(&mut self, actions: &[Action], in_flight_max: usize) -> Result<(), ProgramError> {
        for (index, &action) in actions.iter().enumerate() {
            let refuse = |fault| ProgramError::Action { index, action, fault };
            self.check_and_apply(action, in_flight_max).map_err(refuse)?;
        }
        Ok(())
    }

    fn check_and_apply(&mut self, action: Action, bound: usize) -> Result<(), ActionFault> {
        let (num_units, num_microbatches) = (self.header.chain.num_units, self.header.num_microbatches);
        let microbatch = action.microbatch().unwrap_or(0);
        if action.unit() >= num_units || microbatch >= num_microbatches {
            return Err(ActionFault::OutOfRange { num_units, num_microbatches });
        }
        if !self.is_here(action) {
            return Err(ActionFault::WrongRank(self.header.rank));
        }
        if !self.header.state.is_trained() && action.is_training_only() {
            return Err(ActionFault::OnlyInTraining);
        }
        if self.is_done(action) {
            return Err(ActionFault::Repeated);
        }
        if let Some(missing) = self.first_missing(action) {
            return Err(ActionFault::TooEarly(missing));
        }
        self.apply(action);
        let in_flight = self.units[action.unit()].in_flight;
        let is_over = action.is_pass() && in_flight > bound;
        if is_over { Err(ActionFault::TooManyInFlight { in_flight, bound }) } else { Ok(()) }
    }

    /// Returns whether the unit exists and is on this rank.
    fn holds(&self, unit: usize) -> bool {
        self.units.get(unit).is_some_and(|unit| unit.is_held)
    }

    /// Returns the units on this rank, in order.
    fn held(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.units.len()).filter(|&unit| self.holds(unit))
    }

    /// Returns whether an action belongs on this rank. An action belongs on the rank that holds its unit, with two exceptions: a message is
    /// received by a rank whose unit needs it, and a tied gradient is sent by the rank of the unit that computes it.
    fn is_here(&self, action: Action) -> bool {
        let unit = action.unit();
        let holds_below = || unit.checked_sub(1).is_some_and(|below| self.holds(below));
        let holds_above = || self.holds(unit + 1);
        match action {
            Action::Receive(message) => match message.kind {
                MessageKind::Activation => !self.holds(unit) && holds_above(),
                MessageKind::Gradient => !self.holds(unit) && holds_below(),
                MessageKind::TiedGradient => self.has_tied_gradient(message) && self.holds(unit),
                MessageKind::Parameters => self.has_tie(unit) && !self.holds(unit),
            },
            Action::Send(message) => match message.kind {
                MessageKind::Activation => self.holds(unit) && !holds_above() && unit + 1 < self.units.len(),
                MessageKind::Gradient => self.holds(unit) && unit > 0 && !holds_below(),
                MessageKind::TiedGradient => self.has_tied_gradient(message) && !self.holds(unit),
                MessageKind::Parameters => self.has_tie(unit) && self.holds(unit),
            },
            _ => self.holds(unit),
        }
    }

    /// Returns whether a unit on another rank than the owner reads the owner's parameters.
    fn has_tie(&self, owner: usize) -> bool {
        self.tie.as_ref().is_some_and(|tie| tie.is_across && tie.owner == owner)
    }

    fn has_tied_gradient(&self, message: Message) -> bool {
        self.has_tie(message.unit) && self.header.sends_tied_gradient(message.microbatch)
    }

    fn activations(&self, unit: usize, microbatch: usize) -> Activations {
        self.units[unit].activations[microbatch]
    }

    /// Returns whether an action has had its effect already.
    pub(super) fn is_done(&self, action: Action) -> bool {
        let unit = &self.units[action.unit()];
        match action {
            Action::Forward { microbatch, .. } => unit.activations[microbatch] != Activations::Absent,
            Action::Recompute { microbatch, .. } => {
                let found = unit.activations[microbatch];
                found == Activations::Complete || found.has_input_gradient()
            }
            Action::Backward { microbatch, .. } | Action::BackwardInput { microbatch, .. } => {
                unit.activations[microbatch].has_input_gradient()
            }
            Action::BackwardWeight { microbatch, .. } => unit.activations[microbatch] == Activations::Freed,
            Action::Send(message) | Action::Receive(message) => self.exchanged.contains(message),
            Action::Unshard { .. } => unit.parameters == Parameters::Full,
            Action::Reshard { .. } => {
                unit.parameters == Parameters::Sharded
                    || !self.header.state.is_sharded(StateClass::Parameters)
            }
            // A reduction with nothing to reduce is a repetition if all gradients of a step have been reduced. Otherwise it is too early.
            Action::ReduceGrad { .. } => {
                !unit.has_unreduced
                    && unit.num_added > 0
                    && unit.num_added.is_multiple_of(self.microbatches_per_step)
            }
            Action::UnshardGrad { .. } => unit.has_gathered_grad || !self.gathers_grads,
            Action::Fetch(state) => !self.evicted.contains(&state),
            Action::Evict(state) => {
                self.evicted.contains(&state) || !self.header.state.is_fetched(state.class)
            }
            Action::Step { .. } => unit.num_stepped == self.header.num_steps(),
            Action::Stash { .. } => unit.stashed.back() == Some(&unit.num_stepped),
            Action::Unstash { .. } => false,
        }
    }

    fn apply(&mut self, action: Action) {
        let unit = &mut self.units[action.unit()];
        match action {
            Action::Forward { microbatch, keep, .. } => {
                unit.in_flight += 1;
                unit.version_read[microbatch] = self.header.version_read(microbatch, unit.num_stepped);
                unit.activations[microbatch] = match keep {
                    Keep::All => Activations::Complete,
                    kept => Activations::Kept(kept),
                };
            }
            Action::Recompute { microbatch, .. } => unit.activations[microbatch] = Activations::Complete,
            Action::BackwardInput { microbatch, .. } => unit.activations[microbatch] = Activations::Halved,
            Action::Backward { microbatch, .. } | Action::BackwardWeight { microbatch, .. } => {
                unit.activations[microbatch] = Activations::Freed;
                unit.in_flight -= 1;
                unit.num_added += 1;
                unit.has_unreduced = true;
            }
            Action::Send(message) => self.exchanged.insert(message),
            // A received result has the effect of the action that produced it on the other rank.
            Action::Receive(message) => {
                match message.kind {
                    MessageKind::Activation => unit.activations[message.microbatch] = Activations::Complete,
                    MessageKind::Gradient => unit.activations[message.microbatch] = Activations::Freed,
                    MessageKind::TiedGradient | MessageKind::Parameters => (),
                }
                self.exchanged.insert(message);
            }
            Action::Unshard { .. } => unit.parameters = Parameters::Full,
            Action::Reshard { .. } => unit.parameters = Parameters::Sharded,
            Action::ReduceGrad { .. } => {
                unit.has_unreduced = false;
                unit.num_reduced = unit.num_added / self.microbatches_per_step;
            }
            Action::UnshardGrad { .. } => unit.has_gathered_grad = true,
            Action::Fetch(state) => {
                self.evicted.remove(&state);
            }
            Action::Evict(state) => {
                self.evicted.insert(state);
            }
            Action::Step { .. } => {
                unit.num_stepped += 1;
                unit.has_gathered_grad = false;
                let is_shard = self.header.state.is_sharded(StateClass::Optimizer);
                if is_shard && unit.parameters == Parameters::Full {
                    unit.parameters = Parameters::Stale;
                }
            }
            Action::Stash { .. } => unit.stashed.push_back(unit.num_stepped),
            Action::Unstash { .. } => drop(unit.stashed.pop_front()),
        }
    }

    /// Returns a message that was not sent although another rank waits for it, or a message of the tie that was not received.
    fn missing_message(&self) -> Option<Action> {
        let passes = |unit| (0..self.header.num_microbatches).map(move |microbatch| (unit, microbatch));
        let sends = self.held().flat_map(passes).flat_map(|(unit, microbatch)| {
            [Message::activation(unit, microbatch), Message::gradient(unit, microbatch)].map(Action::Send)
        });
        let ties = self.tie.iter().filter(|tie| tie.is_across).flat_map(|tie| {
            let is_sent = |&(_, microbatch): &(usize, usize)| self.header.sends_tied_gradient(microbatch);
            let grads = passes(tie.owner)
                .filter(is_sent)
                .map(|(unit, microbatch)| Message::tied_gradient(unit, microbatch));
            let messages = grads.chain([Message::parameters(tie.owner)]);
            messages.flat_map(|message| [Action::Send(message), Action::Receive(message)])
        });
        let is_needed = |message: &Action| self.header.state.is_trained() || !message.is_training_only();
        let mut needed = sends.chain(ties).filter(is_needed);
        needed.find(|&message| self.is_here(message) && !self.is_done(message))
    }

    /// Returns a missing message, or else the first action that is missing at the end: an eviction of state, an `UNSTASH`, or the gather or
    /// free that returns parameters to their initial state.
    pub(super) fn missing_at_end(&self) -> Option<Action> {
        if let Some(unsent) = self.missing_message() {
            return Some(unsent);
        }
        let at_rest = [StateClass::Optimizer, StateClass::Parameters, StateClass::Gradients];
        for class in at_rest.into_iter().filter(|&class| self.header.state.is_fetched(class)) {
            let states = self.held().map(|unit| StateKey { class, unit, microbatch: 0 });
            if let Some(state) = states.into_iter().find(|state| !self.evicted.contains(state)) {
                return Some(Action::Evict(state));
            }
        }
        if let Some(unit) = self.units.iter().position(|unit| !unit.stashed.is_empty()) {
            return Some(Action::Unstash { unit });
        }
        let unit = self.held().find(|&unit| self.units[unit].parameters != self.initial_parameters)?;
        Some(match self.initial_parameters {
            Parameters::Sharded => Action::Reshard { unit },
            _ => Action::Unshard { unit },
        })
    }
}
