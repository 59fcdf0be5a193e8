//! What a rank does within a step, one thing at a time.

mod message;
mod text;

pub use message::{Message, MessageKind};

use serde::{Deserialize, Serialize};
use trireme_base::{UnitPasses, named};

named! {
    /// What a unit's forward pass keeps for its backward pass. What is not kept is made again by [`Action::Recompute`].
    #[derive(Default, Serialize, Deserialize)]
    #[serde(rename_all = "lowercase")]
    pub enum Keep {
        /// All that backward reads.
        #[default]
        All = "all",
        /// The unit's input and the results of matrix products and attention, but not what is quickly made from them
        /// (Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022, section 5).
        Products = "products",
        /// The unit's input.
        Input = "input",
        /// Nothing: the unit below is recomputed first, and makes the input again.
        Nothing = "nothing",
    }
}

impl Keep {
    /// Bytes that forward of a unit leaves.
    pub fn kept_bytes(self, passes: &UnitPasses) -> usize {
        match self {
            Keep::All => passes.record,
            Keep::Products => passes.products,
            Keep::Input => passes.input,
            Keep::Nothing => 0,
        }
    }

    /// Floating-point operations of a microbatch that a unit makes again.
    pub fn repeated_operations(self, passes: &UnitPasses) -> u64 {
        match self {
            Keep::All => 0,
            Keep::Products => passes.renewal_cost.operations(),
            Keep::Input | Keep::Nothing => passes.forward_cost.operations(),
        }
    }
}

named! {
    /// A class of state that may live elsewhere than on the device between its uses.
    pub enum StateClass {
        /// What the optimizer keeps of a unit.
        Optimizer = "optimizer",
        /// A unit's parameters, or this rank's shard of them.
        Parameters = "parameters",
        /// The sum of a unit's gradient, or this rank's shard of it.
        Gradients = "gradients",
        /// What forward of a unit for a microbatch has kept.
        Activations = "activations",
    }
}

impl StateClass {
    /// The name in words.
    const fn words(self) -> &'static str {
        match self {
            StateClass::Optimizer => "optimizer state",
            _ => self.name(),
        }
    }
}

/// State that moves as one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(missing_docs, reason = "the names say it")]
pub struct StateOf {
    pub class: StateClass,
    pub unit: usize,
    /// Of which microbatch, for activations; 0 for the other classes.
    pub microbatch: usize,
}

/// One action of a rank within a step. Units and microbatches count from 0, microbatches among those of this rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the variants explain the fields")]
pub enum Action {
    /// `F u m`, or `F u m keep input`: forward of a unit for a microbatch.
    Forward { unit: usize, microbatch: usize, keep: Keep },
    /// `R u m`: makes again what forward of a unit did not keep.
    Recompute { unit: usize, microbatch: usize },
    /// `B u m`: backward of a unit for a microbatch; adds to the unit's gradient.
    Backward { unit: usize, microbatch: usize },
    /// `I u m`: the half of backward that makes the gradient of the unit's input.
    BackwardInput { unit: usize, microbatch: usize },
    /// `W u m`: the other half, which adds to the unit's gradient.
    BackwardWeight { unit: usize, microbatch: usize },
    /// `SEND_F u m`: starts to send a message to the rank that it is for ([`Outline::peer`](crate::Outline::peer)).
    Send(Message),
    /// `RECV_F u m`: starts to receive a message from the rank that has made it. What reads it waits for it.
    Receive(Message),
    /// `UNSHARD u`: starts to gather a unit's parameters from their shards, or from a copy that ranks of the host have kept since
    /// the unit's last `STEP`. Readers wait for them.
    Unshard { unit: usize },
    /// `RESHARD u`: gives the gathered parameters of a unit back; the shard stays.
    Reshard { unit: usize },
    /// `REDUCE_GRAD u`: starts the data-parallel reduction of what backward has added to a unit's gradient since the last one.
    ReduceGrad { unit: usize },
    /// `UNSHARD_GRAD u`: starts to gather a unit's gradient from the shards of the data-parallel ranks, once all of its
    /// reductions have ended. `STEP` waits for it, and gives it back.
    UnshardGrad { unit: usize },
    /// `FETCH optimizer u`, `FETCH activations u m`: starts to bring state back from where it lives. Its users wait for it.
    Fetch(StateOf),
    /// `EVICT optimizer u`, `EVICT activations u m`: starts to bring state back to where it lives, and frees its memory.
    Evict(StateOf),
    /// `STEP u`: updates a unit's parameters, or this rank's shard. The first of a program waits for all reductions, for the global
    /// norm; without a drain between updates, the first of each update waits for this rank's reductions.
    Step { unit: usize },
    /// `STASH u`: keeps a copy of a unit's parameters as they are, for passes that read them after the next `STEP`.
    Stash { unit: usize },
    /// `UNSTASH u`: gives the oldest copy of a unit's parameters back, which no later pass reads.
    Unstash { unit: usize },
}

/// What an action occupies. Order within a stream is the program's; across streams it follows the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stream {
    /// The device.
    Compute,
    /// Communication between data-parallel ranks.
    DataParallel,
    /// Messages between the ranks of a pipeline.
    Pipeline,
    /// Transfers to and from the host's memory and disks.
    Offload,
}

impl Action {
    /// The stream that the action belongs to.
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

    /// Whether it is a part of training.
    pub(crate) fn trains(self) -> bool {
        match self {
            Action::Send(message) | Action::Receive(message) => message.kind != MessageKind::Activation,
            Action::Fetch(state) | Action::Evict(state) => state.class != StateClass::Parameters,
            _ => !matches!(self, Action::Forward { .. } | Action::Unshard { .. } | Action::Reshard { .. }),
        }
    }

    /// The classes of state that the action works with, which are to be at hand.
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

    /// Of a class that the action works with, the state that it is.
    pub fn state(self, class: StateClass) -> StateOf {
        let microbatch = if class == StateClass::Activations { self.microbatch() } else { None };
        StateOf { class, unit: self.unit(), microbatch: microbatch.unwrap_or(0) }
    }

    /// Whether the action is a pass of a unit: forward, recomputation, backward or half of it.
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

    /// What the other rank does for a message, if the action is one.
    pub fn counterpart(self) -> Option<Action> {
        match self {
            Action::Send(message) => Some(Action::Receive(message)),
            Action::Receive(message) => Some(Action::Send(message)),
            _ => None,
        }
    }

    /// The unit whose gradient is complete for a microbatch after the action, and the microbatch, if it completes one.
    pub fn completed_gradient(self) -> Option<(usize, usize)> {
        match self {
            Action::Backward { unit, microbatch } | Action::BackwardWeight { unit, microbatch } => {
                Some((unit, microbatch))
            }
            _ => None,
        }
    }

    /// The message that a pass waits for where the unit below it in forward, or above it in backward, is on another rank. The last unit's
    /// backward has none above.
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

    /// The microbatch that the action is about, if it is about one.
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

    /// The unit that the action is about.
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
