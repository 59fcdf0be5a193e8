//! Actions: the operations that one rank executes within a training step.
//!
//! A new action needs its text form (`action/text.rs`), its rules in `validate/state.rs` and `validate/state/prerequisites.rs`, and its arm
//! in `Executor::run_action` (crate `parallel`).

mod message;
mod text;

pub use message::{Message, MessageKind};

use serde::{Deserialize, Serialize};
use trireme_base::{UnitPasses, named};

named! {
    /// The activations that a unit's forward pass keeps for its backward pass. [`Action::Recompute`] recomputes the others.
    #[derive(Default, Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    pub enum Keep {
        /// All activations that backward reads.
        #[default]
        All = "all",
        /// The unit's input and the outputs of matrix products and attention. Activations that are cheap to derive from these are
        /// recomputed (Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022, section 5).
        Products = "products",
        /// Only the unit's input.
        Input = "input",
        /// Nothing. The unit below is recomputed first and produces this unit's input again.
        Nothing = "nothing",
    }
}

impl Keep {
    /// Returns the bytes of activations that forward of a unit keeps for one microbatch.
    pub fn kept_bytes(self, passes: &UnitPasses) -> usize {
        match self {
            Keep::All => passes.saved,
            Keep::Products => passes.products,
            Keep::Input => passes.input,
            Keep::Nothing => 0,
        }
    }

    /// Returns the floating-point operations that recomputation of a unit costs for one microbatch.
    pub fn recompute_operations(self, passes: &UnitPasses) -> u64 {
        match self {
            Keep::All => 0,
            Keep::Products => passes.recompute_cost.operations(),
            Keep::Input | Keep::Nothing => passes.forward_cost.operations(),
        }
    }
}

named! {
    /// A class of training state. Each class may reside off the device between its uses.
    pub enum StateClass {
        /// The optimizer state of a unit.
        Optimizer = "optimizer",
        /// The parameters of a unit, or this rank's shard of them.
        Parameters = "parameters",
        /// The accumulated gradient of a unit, or this rank's shard of it.
        Gradients = "gradients",
        /// The activations that a unit's forward pass keeps for one microbatch.
        Activations = "activations",
    }
}

impl StateClass {
    /// Returns the name for messages to users.
    const fn words(self) -> &'static str {
        match self {
            StateClass::Optimizer => "optimizer state",
            _ => self.name(),
        }
    }
}

/// The smallest piece of state that is fetched or evicted: the state of one class and one unit. Activations also belong to one microbatch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(missing_docs, reason = "the names say it")]
pub struct StateKey {
    pub class: StateClass,
    pub unit: usize,
    /// The microbatch of activations; 0 for the other classes.
    pub microbatch: usize,
}

/// One action of a rank within a step. Units are numbered from 0 along the model; microbatches are numbered from 0 among those of this
/// rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the variants explain the fields")]
pub enum Action {
    /// `F u m`, or `F u m keep input`: forward of a unit for a microbatch.
    Forward { unit: usize, microbatch: usize, keep: Keep },
    /// `R u m`: recomputes the activations that forward of a unit did not keep.
    Recompute { unit: usize, microbatch: usize },
    /// `B u m`: backward of a unit for a microbatch. Adds to the unit's gradient.
    Backward { unit: usize, microbatch: usize },
    /// `I u m`: the input half of backward, which computes the gradient of the unit's input.
    BackwardInput { unit: usize, microbatch: usize },
    /// `W u m`: the weight half of backward, which adds to the unit's gradient.
    BackwardWeight { unit: usize, microbatch: usize },
    /// `SEND_F u m`: starts to send a message to its receiver ([`ProgramHeader::peer`](crate::ProgramHeader::peer)).
    Send(Message),
    /// `RECV_F u m`: starts to receive a message from the rank that produced it. Actions that read the message wait for it.
    Receive(Message),
    /// `UNSHARD u`: starts to gather a unit's parameters. With ZeRO++, the ranks of a host may keep a second set of shards, valid until the
    /// unit's next `STEP`, and gather from it. Actions that read the parameters wait for them.
    Unshard { unit: usize },
    /// `RESHARD u`: frees the gathered parameters of a unit. The shard stays.
    Reshard { unit: usize },
    /// `REDUCE_GRAD u`: starts the data-parallel reduction of the contributions that backward has added to a unit's gradient since the last
    /// reduction.
    ReduceGrad { unit: usize },
    /// `UNSHARD_GRAD u`: starts to gather a unit's gradient from the shards of the data-parallel ranks, once all reductions of the gradient
    /// have completed. `STEP` waits for the gathered gradient and frees it.
    UnshardGrad { unit: usize },
    /// `FETCH optimizer u`, `FETCH activations u m`: starts to load state from the tier where it resides. Actions that use the state wait
    /// for it.
    Fetch(StateKey),
    /// `EVICT optimizer u`, `EVICT activations u m`: starts to write state back to the tier where it resides, and frees its memory.
    Evict(StateKey),
    /// `STEP u`: updates a unit's parameters, or this rank's shard of them. The first `STEP` of a program waits for all reductions, because
    /// it needs the global gradient norm, unless the layout [updates early](crate::StateLayout::updates_early). If the pipeline does not
    /// drain between updates, the first `STEP` of each update waits for the reductions of this rank.
    Step { unit: usize },
    /// `STASH u`: copies a unit's current parameters for passes that read them after the next `STEP`.
    Stash { unit: usize },
    /// `UNSTASH u`: frees the oldest copy of a unit's parameters, which no later pass reads.
    Unstash { unit: usize },
}

/// The resource that an action occupies. Actions of one stream run in program order; across streams, data dependencies order them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stream {
    /// The device.
    Compute,
    /// Communication between data-parallel ranks.
    DataParallel,
    /// Messages between the ranks of a pipeline.
    Pipeline,
    /// Transfers to and from host memory and disks.
    Offload,
}

impl Action {
    /// Returns the stream of the action.
    pub fn stream(self) -> Stream {
        match self {
            Action::Unshard { .. } | Action::ReduceGrad { .. } | Action::UnshardGrad { .. } => {
                Stream::DataParallel
            }
            Action::Send(_) | Action::Receive(_) => Stream::Pipeline,
            Action::Fetch(_) | Action::Evict(_) => Stream::Offload,
            _ => Stream::Compute,
        }
    }

    /// Returns whether the action is valid only in programs that train.
    pub(crate) fn is_training_only(self) -> bool {
        match self {
            Action::Send(message) | Action::Receive(message) => message.kind != MessageKind::Activation,
            Action::Fetch(state) | Action::Evict(state) => state.class != StateClass::Parameters,
            _ => !matches!(self, Action::Forward { .. } | Action::Unshard { .. } | Action::Reshard { .. }),
        }
    }

    /// Returns the classes of state that the action uses. Evicted state must be fetched before the action.
    pub fn uses(self) -> &'static [StateClass] {
        match self {
            Action::Unshard { .. } => &[StateClass::Parameters],
            Action::Step { .. } => &[StateClass::Optimizer, StateClass::Parameters, StateClass::Gradients],
            Action::Recompute { .. } | Action::Backward { .. } | Action::BackwardInput { .. } => {
                &[StateClass::Activations]
            }
            _ => &[],
        }
    }

    /// Returns the piece of state that the action uses, for a class that it [uses](Action::uses).
    pub fn state(self, class: StateClass) -> StateKey {
        let microbatch = if class == StateClass::Activations { self.microbatch() } else { None };
        StateKey { class, unit: self.unit(), microbatch: microbatch.unwrap_or(0) }
    }

    /// Returns whether the action is a pass of a unit: forward, recomputation, backward or a half of backward.
    pub fn is_pass(self) -> bool {
        matches!(
            self,
            Action::Forward { .. }
                | Action::Recompute { .. }
                | Action::Backward { .. }
                | Action::BackwardInput { .. }
                | Action::BackwardWeight { .. }
        )
    }

    /// Returns the matching action on the other rank: the receive of a send, or the send of a receive. `None` for other actions.
    pub fn counterpart(self) -> Option<Action> {
        match self {
            Action::Send(message) => Some(Action::Receive(message)),
            Action::Receive(message) => Some(Action::Send(message)),
            _ => None,
        }
    }

    /// Returns the unit and the microbatch whose gradient contribution the action completes, if it completes one.
    pub fn completed_gradient(self) -> Option<(usize, usize)> {
        match self {
            Action::Backward { unit, microbatch } | Action::BackwardWeight { unit, microbatch } => {
                Some((unit, microbatch))
            }
            _ => None,
        }
    }

    /// Returns the message that a pass waits for if the neighboring unit is on another rank: the unit below for forward, the unit above
    /// for backward and its input half. For backward of the last unit, which has no unit above, returns a message that no rank sends.
    pub fn awaited_message(self) -> Option<Message> {
        match self {
            Action::Forward { unit, microbatch, .. } => {
                Some(Message::activation(unit.checked_sub(1)?, microbatch))
            }
            Action::Backward { unit, microbatch } | Action::BackwardInput { unit, microbatch } => {
                Some(Message::gradient(unit + 1, microbatch))
            }
            _ => None,
        }
    }

    /// Returns the microbatch of the action, if it has one.
    pub fn microbatch(self) -> Option<usize> {
        match self {
            Action::Fetch(state) | Action::Evict(state) if state.class == StateClass::Activations => {
                Some(state.microbatch)
            }
            Action::Send(message) | Action::Receive(message) if message.kind != MessageKind::Parameters => {
                Some(message.microbatch)
            }
            Action::Forward { microbatch, .. }
            | Action::Recompute { microbatch, .. }
            | Action::Backward { microbatch, .. }
            | Action::BackwardInput { microbatch, .. }
            | Action::BackwardWeight { microbatch, .. } => Some(microbatch),
            _ => None,
        }
    }

    /// Returns the unit of the action.
    pub fn unit(self) -> usize {
        match self {
            Action::Forward { unit, .. }
            | Action::Recompute { unit, .. }
            | Action::Backward { unit, .. }
            | Action::BackwardInput { unit, .. }
            | Action::BackwardWeight { unit, .. }
            | Action::Unshard { unit }
            | Action::Reshard { unit }
            | Action::ReduceGrad { unit }
            | Action::UnshardGrad { unit }
            | Action::Step { unit }
            | Action::Stash { unit }
            | Action::Unstash { unit } => unit,
            Action::Send(message) | Action::Receive(message) => message.unit,
            Action::Fetch(state) | Action::Evict(state) => state.unit,
        }
    }
}
