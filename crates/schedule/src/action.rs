use std::fmt;
use std::str::FromStr;

/// What a unit's forward pass keeps for its backward pass. What is not kept is made again by [`Action::Recompute`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Keep {
    /// All that backward reads.
    #[default]
    All,
    /// The unit's input and the results of matrix products and attention, but not what is quickly made from them
    /// (Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022, section 5).
    Products,
    /// The unit's input.
    Input,
    /// Nothing: the unit below is recomputed first, and makes the input again.
    Nothing,
}

impl Keep {
    /// Every choice, from the one that keeps most.
    pub const ALL: [Keep; 4] = [Keep::All, Keep::Products, Keep::Input, Keep::Nothing];

    /// Name in programs.
    pub const fn name(self) -> &'static str {
        match self {
            Keep::All => "all",
            Keep::Products => "products",
            Keep::Input => "input",
            Keep::Nothing => "nothing",
        }
    }
}

/// A class of state that may live elsewhere than on the device between its uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StateClass {
    /// What the optimizer keeps of a unit.
    Optimizer,
    /// This rank's shard of a unit's parameters.
    Parameters,
    /// This rank's shard of a unit's reduced gradient.
    Gradients,
    /// What forward of a unit for a microbatch has kept.
    Activations,
}

impl StateClass {
    /// Every class.
    pub const ALL: [StateClass; 4] =
        [StateClass::Optimizer, StateClass::Parameters, StateClass::Gradients, StateClass::Activations];

    /// Name in programs.
    pub const fn name(self) -> &'static str {
        match self {
            StateClass::Optimizer => "optimizer",
            StateClass::Parameters => "parameters",
            StateClass::Gradients => "gradients",
            StateClass::Activations => "activations",
        }
    }

    /// The class of this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|class| class.name() == name)
    }
}

/// State that moves as one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StateOf {
    /// What it is.
    pub class: StateClass,
    /// Of which unit.
    pub unit: usize,
    /// Of which microbatch, for activations; 0 for the other classes.
    pub microbatch: usize,
}

impl fmt::Display for StateOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.class.name(), self.unit)?;
        if self.class == StateClass::Activations { write!(f, " {}", self.microbatch) } else { Ok(()) }
    }
}

/// One thing a rank does within a step. Units and microbatches are counted from 0; a microbatch by its place
/// among those of this rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// `F u m`, or `F u m keep input`: forward of a unit for a microbatch.
    Forward {
        /// Unit.
        unit: usize,
        /// Microbatch.
        microbatch: usize,
        /// What backward is left.
        keep: Keep,
    },
    /// `R u m`: makes again what forward of a unit did not keep.
    Recompute {
        /// Unit.
        unit: usize,
        /// Microbatch.
        microbatch: usize,
    },
    /// `B u m`: backward of a unit for a microbatch; adds to the unit's gradient.
    Backward {
        /// Unit.
        unit: usize,
        /// Microbatch.
        microbatch: usize,
    },
    /// `I u m`: the half of backward that makes the gradient of the unit's input.
    BackwardInput {
        /// Unit.
        unit: usize,
        /// Microbatch.
        microbatch: usize,
    },
    /// `W u m`: the other half, which adds to the unit's gradient.
    BackwardWeight {
        /// Unit.
        unit: usize,
        /// Microbatch.
        microbatch: usize,
    },
    /// `SEND_F u m`: starts to send what forward of a unit has made to the rank of the unit above.
    SendForward {
        /// Unit.
        unit: usize,
        /// Microbatch.
        microbatch: usize,
    },
    /// `RECV_F u m`: starts to receive what forward of a unit has made on another rank. The unit above waits for it.
    ReceiveForward {
        /// Unit.
        unit: usize,
        /// Microbatch.
        microbatch: usize,
    },
    /// `SEND_B u m`: starts to send the gradient of a unit's input to the rank of the unit below.
    SendBackward {
        /// Unit.
        unit: usize,
        /// Microbatch.
        microbatch: usize,
    },
    /// `RECV_B u m`: starts to receive the gradient of the input of a unit on another rank. The unit below waits for it.
    ReceiveBackward {
        /// Unit.
        unit: usize,
        /// Microbatch.
        microbatch: usize,
    },
    /// `SEND_GRAD u m`: starts to send what a unit here has for the gradient of unit `u`, whose parameters it reads, to the rank
    /// of that one.
    SendGrad {
        /// Unit whose gradient it is.
        unit: usize,
        /// Microbatch.
        microbatch: usize,
    },
    /// `RECV_GRAD u m`: starts to receive what a unit on another rank has for the gradient of unit `u`. What completes that
    /// gradient here waits for it, and adds to it.
    ReceiveGrad {
        /// Unit whose gradient it is.
        unit: usize,
        /// Microbatch.
        microbatch: usize,
    },
    /// `SEND_PARAM u`: sends a unit's parameters to the rank of the unit that reads them, too.
    SendParameters {
        /// Unit.
        unit: usize,
    },
    /// `RECV_PARAM u`: receives the parameters of a unit on another rank that a unit here reads.
    ReceiveParameters {
        /// Unit.
        unit: usize,
    },
    /// `UNSHARD u`: starts to gather a unit's parameters from the nearest complete copy: the shards of the data-parallel ranks,
    /// or what ranks of the host have kept of an earlier gathering since the unit's last `STEP`. What reads them waits for
    /// them.
    Unshard {
        /// Unit.
        unit: usize,
    },
    /// `RESHARD u`: gives the gathered parameters of a unit back; the shard stays.
    Reshard {
        /// Unit.
        unit: usize,
    },
    /// `REDUCE_GRAD u`: starts the reduction over the data-parallel ranks of what backward has added to a unit's
    /// gradient since the last one.
    ReduceGrad {
        /// Unit.
        unit: usize,
    },
    /// `FETCH optimizer u`, `FETCH activations u m`: starts to bring state back from where it lives. What works with it waits
    /// for it.
    Fetch(StateOf),
    /// `EVICT optimizer u`, `EVICT activations u m`: starts to bring state back to where it lives, and frees its memory.
    Evict(StateOf),
    /// `STEP u`: updates a unit's parameters, or this rank's shard of them. The first of a program waits for every
    /// reduction, for the gradients' global norm needs all of them. In a pipeline that does not drain between updates, the first of
    /// each update waits for the reductions of this rank.
    Step {
        /// Unit.
        unit: usize,
    },
    /// `STASH u`: keeps a copy of a unit's parameters as they are, for passes that read them after the next `STEP`.
    Stash {
        /// Unit.
        unit: usize,
    },
    /// `UNSTASH u`: gives the oldest copy of a unit's parameters back, which no later pass reads.
    Unstash {
        /// Unit.
        unit: usize,
    },
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
            Action::Unshard { .. } | Action::ReduceGrad { .. } => Stream::DataParallel,
            Action::SendForward { .. }
            | Action::ReceiveForward { .. }
            | Action::SendBackward { .. }
            | Action::ReceiveBackward { .. }
            | Action::SendGrad { .. }
            | Action::ReceiveGrad { .. }
            | Action::SendParameters { .. }
            | Action::ReceiveParameters { .. } => Stream::Pipeline,
            Action::Fetch(_) | Action::Evict(_) => Stream::Offload,
            _ => Stream::Compute,
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
        Some(match self {
            Action::SendForward { unit, microbatch } => Action::ReceiveForward { unit, microbatch },
            Action::ReceiveForward { unit, microbatch } => Action::SendForward { unit, microbatch },
            Action::SendBackward { unit, microbatch } => Action::ReceiveBackward { unit, microbatch },
            Action::ReceiveBackward { unit, microbatch } => Action::SendBackward { unit, microbatch },
            Action::SendGrad { unit, microbatch } => Action::ReceiveGrad { unit, microbatch },
            Action::ReceiveGrad { unit, microbatch } => Action::SendGrad { unit, microbatch },
            Action::SendParameters { unit } => Action::ReceiveParameters { unit },
            Action::ReceiveParameters { unit } => Action::SendParameters { unit },
            _ => return None,
        })
    }

    /// The microbatch that the action is about, if it is about one.
    pub fn microbatch(self) -> Option<usize> {
        match self {
            Action::Fetch(state) | Action::Evict(state) if state.class == StateClass::Activations => {
                Some(state.microbatch)
            }
            Action::Forward { microbatch, .. }
            | Action::Recompute { microbatch, .. }
            | Action::Backward { microbatch, .. }
            | Action::BackwardInput { microbatch, .. }
            | Action::BackwardWeight { microbatch, .. }
            | Action::SendForward { microbatch, .. }
            | Action::ReceiveForward { microbatch, .. }
            | Action::SendBackward { microbatch, .. }
            | Action::ReceiveBackward { microbatch, .. }
            | Action::SendGrad { microbatch, .. }
            | Action::ReceiveGrad { microbatch, .. } => Some(microbatch),
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
            | Action::SendForward { unit, .. }
            | Action::ReceiveForward { unit, .. }
            | Action::SendBackward { unit, .. }
            | Action::ReceiveBackward { unit, .. }
            | Action::SendGrad { unit, .. }
            | Action::ReceiveGrad { unit, .. }
            | Action::SendParameters { unit }
            | Action::ReceiveParameters { unit }
            | Action::Unshard { unit }
            | Action::Reshard { unit }
            | Action::ReduceGrad { unit }
            | Action::Step { unit }
            | Action::Stash { unit }
            | Action::Unstash { unit } => unit,
            Action::Fetch(state) | Action::Evict(state) => state.unit,
        }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Action::Forward { unit, microbatch, keep: Keep::All } => write!(f, "F {unit} {microbatch}"),
            Action::Forward { unit, microbatch, keep } => {
                write!(f, "F {unit} {microbatch} keep {}", keep.name())
            }
            Action::Recompute { unit, microbatch } => write!(f, "R {unit} {microbatch}"),
            Action::Backward { unit, microbatch } => write!(f, "B {unit} {microbatch}"),
            Action::BackwardInput { unit, microbatch } => write!(f, "I {unit} {microbatch}"),
            Action::BackwardWeight { unit, microbatch } => write!(f, "W {unit} {microbatch}"),
            Action::SendForward { unit, microbatch } => write!(f, "SEND_F {unit} {microbatch}"),
            Action::ReceiveForward { unit, microbatch } => write!(f, "RECV_F {unit} {microbatch}"),
            Action::SendBackward { unit, microbatch } => write!(f, "SEND_B {unit} {microbatch}"),
            Action::ReceiveBackward { unit, microbatch } => write!(f, "RECV_B {unit} {microbatch}"),
            Action::SendGrad { unit, microbatch } => write!(f, "SEND_GRAD {unit} {microbatch}"),
            Action::ReceiveGrad { unit, microbatch } => write!(f, "RECV_GRAD {unit} {microbatch}"),
            Action::SendParameters { unit } => write!(f, "SEND_PARAM {unit}"),
            Action::ReceiveParameters { unit } => write!(f, "RECV_PARAM {unit}"),
            Action::Unshard { unit } => write!(f, "UNSHARD {unit}"),
            Action::Reshard { unit } => write!(f, "RESHARD {unit}"),
            Action::ReduceGrad { unit } => write!(f, "REDUCE_GRAD {unit}"),
            Action::Fetch(state) => write!(f, "FETCH {state}"),
            Action::Evict(state) => write!(f, "EVICT {state}"),
            Action::Step { unit } => write!(f, "STEP {unit}"),
            Action::Stash { unit } => write!(f, "STASH {unit}"),
            Action::Unstash { unit } => write!(f, "UNSTASH {unit}"),
        }
    }
}

/// The text is no action.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{0}' is no action; expected 'F unit microbatch' (and 'keep products', 'keep input' or 'keep nothing'), 'R unit \
     microbatch', 'B unit microbatch', 'I unit microbatch', 'W unit microbatch', 'SEND_F unit microbatch', 'RECV_F unit microbatch', 'SEND_B unit microbatch', 'RECV_B unit \
     microbatch', 'SEND_GRAD unit microbatch', 'RECV_GRAD unit microbatch', 'SEND_PARAM unit', 'RECV_PARAM unit', 'UNSHARD unit', 'RESHARD unit', 'REDUCE_GRAD unit', 'FETCH class unit', 'EVICT class unit', 'STEP unit', 'STASH unit' or 'UNSTASH unit'"
)]
pub struct ParseActionError(pub String);

impl FromStr for Action {
    type Err = ParseActionError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let refuse = || ParseActionError(text.to_owned());
        let number = |word: &str| word.parse::<usize>().map_err(|_| refuse());
        let words: Vec<&str> = text.split_whitespace().collect();
        match words[..] {
            ["F", unit, microbatch] => {
                Ok(Action::Forward { unit: number(unit)?, microbatch: number(microbatch)?, keep: Keep::All })
            }
            ["F", unit, microbatch, "keep", name] => {
                let keep = Keep::ALL.into_iter().find(|keep| keep.name() == name).ok_or_else(refuse)?;
                Ok(Action::Forward { unit: number(unit)?, microbatch: number(microbatch)?, keep })
            }
            [
                verb @ ("R" | "B" | "I" | "W" | "SEND_F" | "RECV_F" | "SEND_B" | "RECV_B" | "SEND_GRAD"
                | "RECV_GRAD"),
                unit,
                microbatch,
            ] => {
                let (unit, microbatch) = (number(unit)?, number(microbatch)?);
                Ok(match verb {
                    "R" => Action::Recompute { unit, microbatch },
                    "B" => Action::Backward { unit, microbatch },
                    "I" => Action::BackwardInput { unit, microbatch },
                    "W" => Action::BackwardWeight { unit, microbatch },
                    "SEND_F" => Action::SendForward { unit, microbatch },
                    "RECV_F" => Action::ReceiveForward { unit, microbatch },
                    "SEND_B" => Action::SendBackward { unit, microbatch },
                    "RECV_B" => Action::ReceiveBackward { unit, microbatch },
                    "SEND_GRAD" => Action::SendGrad { unit, microbatch },
                    _ => Action::ReceiveGrad { unit, microbatch },
                })
            }
            ["SEND_PARAM", unit] => Ok(Action::SendParameters { unit: number(unit)? }),
            ["RECV_PARAM", unit] => Ok(Action::ReceiveParameters { unit: number(unit)? }),
            ["UNSHARD", unit] => Ok(Action::Unshard { unit: number(unit)? }),
            ["RESHARD", unit] => Ok(Action::Reshard { unit: number(unit)? }),
            ["REDUCE_GRAD", unit] => Ok(Action::ReduceGrad { unit: number(unit)? }),
            [verb @ ("FETCH" | "EVICT"), class, unit, ref rest @ ..] => {
                let class = StateClass::named(class).ok_or_else(refuse)?;
                let microbatch = match (class, rest) {
                    (StateClass::Activations, [microbatch]) => number(microbatch)?,
                    (StateClass::Activations, _) | (_, [_, ..]) => return Err(refuse()),
                    (_, []) => 0,
                };
                let state = StateOf { class, unit: number(unit)?, microbatch };
                Ok(if verb == "FETCH" { Action::Fetch(state) } else { Action::Evict(state) })
            }
            ["STEP", unit] => Ok(Action::Step { unit: number(unit)? }),
            ["STASH", unit] => Ok(Action::Stash { unit: number(unit)? }),
            ["UNSTASH", unit] => Ok(Action::Unstash { unit: number(unit)? }),
            _ => Err(refuse()),
        }
    }
}
