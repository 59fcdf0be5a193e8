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
    /// `UNSHARD u`: starts to gather a unit's parameters from the shards of the data-parallel ranks. What reads them
    /// waits for them.
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
    /// `STEP u`: updates a unit's parameters, or this rank's shard of them. The first of a program waits for every
    /// reduction, for the gradients' global norm needs all of them.
    Step {
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
}

impl Action {
    /// The stream that the action belongs to.
    pub fn stream(self) -> Stream {
        match self {
            Action::Unshard { .. } | Action::ReduceGrad { .. } => Stream::DataParallel,
            _ => Stream::Compute,
        }
    }

    /// The microbatch that the action is about, if it is about one.
    pub fn microbatch(self) -> Option<usize> {
        match self {
            Action::Forward { microbatch, .. }
            | Action::Recompute { microbatch, .. }
            | Action::Backward { microbatch, .. } => Some(microbatch),
            _ => None,
        }
    }

    /// The unit that the action is about.
    pub fn unit(self) -> usize {
        match self {
            Action::Forward { unit, .. }
            | Action::Recompute { unit, .. }
            | Action::Backward { unit, .. }
            | Action::Unshard { unit }
            | Action::Reshard { unit }
            | Action::ReduceGrad { unit }
            | Action::Step { unit } => unit,
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
            Action::Unshard { unit } => write!(f, "UNSHARD {unit}"),
            Action::Reshard { unit } => write!(f, "RESHARD {unit}"),
            Action::ReduceGrad { unit } => write!(f, "REDUCE_GRAD {unit}"),
            Action::Step { unit } => write!(f, "STEP {unit}"),
        }
    }
}

/// The text is no action.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{0}' is no action; expected 'F unit microbatch' (and 'keep products', 'keep input' or 'keep nothing'), 'R unit \
     microbatch', 'B unit microbatch', 'UNSHARD unit', 'RESHARD unit', 'REDUCE_GRAD unit' or 'STEP unit'"
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
            ["R", unit, microbatch] => {
                Ok(Action::Recompute { unit: number(unit)?, microbatch: number(microbatch)? })
            }
            ["B", unit, microbatch] => {
                Ok(Action::Backward { unit: number(unit)?, microbatch: number(microbatch)? })
            }
            ["UNSHARD", unit] => Ok(Action::Unshard { unit: number(unit)? }),
            ["RESHARD", unit] => Ok(Action::Reshard { unit: number(unit)? }),
            ["REDUCE_GRAD", unit] => Ok(Action::ReduceGrad { unit: number(unit)? }),
            ["STEP", unit] => Ok(Action::Step { unit: number(unit)? }),
            _ => Err(refuse()),
        }
    }
}
