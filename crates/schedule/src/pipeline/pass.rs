use crate::parse::{ParseError, shortened};
use std::fmt;
use std::str::FromStr;
use trireme_base::named;

named! {
    /// The kind of a pass of a stage.
    pub enum PassKind {
        /// Forward. Its result goes to the next stage.
        Forward = "F",
        /// Full backward. The gradient of its input goes to the previous stage.
        Backward = "B",
        /// The half of backward that computes the gradient of the stage's input.
        BackwardInput = "I",
        /// The half of backward that computes the gradients of the stage's weights.
        BackwardWeight = "W",
        /// The update of the stage's weights, in schedules that do not drain between updates.
        Update = "U",
    }
}

impl PassKind {
    /// Returns the name in words.
    pub const fn words(self) -> &'static str {
        match self {
            PassKind::Forward => "forward",
            PassKind::Backward => "backward",
            PassKind::BackwardInput => "backward, input half",
            PassKind::BackwardWeight => "backward, weight half",
            PassKind::Update => "update",
        }
    }
}

/// One stage's work for one microbatch: `F 3 0` is forward of stage 3 for microbatch 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pass {
    /// The kind of the pass.
    pub kind: PassKind,
    /// Stage, counted from 0 along the model.
    pub stage: usize,
    /// Microbatch, counted from 0 through all steps of the schedule; for an update, the last microbatch whose gradient it applies.
    pub microbatch: usize,
}

impl Pass {
    /// Creates `F stage microbatch`.
    pub const fn forward(stage: usize, microbatch: usize) -> Pass {
        Pass { kind: PassKind::Forward, stage, microbatch }
    }

    /// Creates `B stage microbatch`.
    pub const fn backward(stage: usize, microbatch: usize) -> Pass {
        Pass { kind: PassKind::Backward, stage, microbatch }
    }

    /// Creates `I stage microbatch`.
    pub const fn backward_input(stage: usize, microbatch: usize) -> Pass {
        Pass { kind: PassKind::BackwardInput, stage, microbatch }
    }

    /// Creates `W stage microbatch`.
    pub const fn backward_weight(stage: usize, microbatch: usize) -> Pass {
        Pass { kind: PassKind::BackwardWeight, stage, microbatch }
    }

    /// Creates `U stage microbatch`.
    pub const fn update(stage: usize, microbatch: usize) -> Pass {
        Pass { kind: PassKind::Update, stage, microbatch }
    }

    /// Returns the stage that waits for the pass's result, in a model of `num_stages` stages.
    pub fn result_goes_to(self, num_stages: usize) -> Option<usize> {
        match self.kind {
            PassKind::Forward => (self.stage + 1 < num_stages).then_some(self.stage + 1),
            PassKind::Backward | PassKind::BackwardInput => self.stage.checked_sub(1),
            PassKind::BackwardWeight | PassKind::Update => None,
        }
    }
}

impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.kind, self.stage, self.microbatch)
    }
}

impl FromStr for Pass {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parse = || {
            let words: Vec<&str> = text.split_whitespace().collect();
            let [letter, stage, microbatch] = words[..] else { return None };
            let kind = PassKind::named(letter)?;
            Some(Pass { kind, stage: stage.parse().ok()?, microbatch: microbatch.parse().ok()? })
        };
        parse().ok_or_else(|| {
            let found = shortened(text);
            ParseError(format!(
                "'{found}' is not a pass; expected a letter (F, B, I, W or U), a stage and a microbatch, such as 'F 3 0'"
            ))
        })
    }
}
