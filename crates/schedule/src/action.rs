use std::fmt;
use std::str::FromStr;

/// One thing a rank does within a step. Units and microbatches are counted from 0; a microbatch by its place
/// among those of this rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Action {
    /// `F u m`: forward of a unit for a microbatch.
    Forward {
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
    /// `REDUCE_GRAD u`: starts the reduction of a unit's gradient over the data-parallel ranks.
    ReduceGrad {
        /// Unit.
        unit: usize,
    },
    /// `STEP u`: updates a unit's parameters. The first of a program waits for every reduction, for the
    /// gradients' global norm needs all of them.
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
            Action::ReduceGrad { .. } => Stream::DataParallel,
            _ => Stream::Compute,
        }
    }

    /// The unit that the action is about.
    pub fn unit(self) -> usize {
        match self {
            Action::Forward { unit, .. }
            | Action::Backward { unit, .. }
            | Action::ReduceGrad { unit }
            | Action::Step { unit } => unit,
        }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Action::Forward { unit, microbatch } => write!(f, "F {unit} {microbatch}"),
            Action::Backward { unit, microbatch } => write!(f, "B {unit} {microbatch}"),
            Action::ReduceGrad { unit } => write!(f, "REDUCE_GRAD {unit}"),
            Action::Step { unit } => write!(f, "STEP {unit}"),
        }
    }
}

/// The text is no action.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{0}' is no action; expected 'F unit microbatch', 'B unit microbatch', 'REDUCE_GRAD unit' or 'STEP unit'"
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
                Ok(Action::Forward { unit: number(unit)?, microbatch: number(microbatch)? })
            }
            ["B", unit, microbatch] => {
                Ok(Action::Backward { unit: number(unit)?, microbatch: number(microbatch)? })
            }
            ["REDUCE_GRAD", unit] => Ok(Action::ReduceGrad { unit: number(unit)? }),
            ["STEP", unit] => Ok(Action::Step { unit: number(unit)? }),
            _ => Err(refuse()),
        }
    }
}
