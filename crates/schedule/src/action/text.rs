//! The text form of actions: a line of a program.

use super::{Action, Keep, Message, MessageKind, StateClass, StateOf};
use std::fmt;
use std::str::FromStr;

impl fmt::Display for StateOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.class.name(), self.unit)?;
        if self.class == StateClass::Activations { write!(f, " {}", self.microbatch) } else { Ok(()) }
    }
}

impl fmt::Display for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind.name(), self.unit)?;
        if self.kind == MessageKind::Parameters { Ok(()) } else { write!(f, " {}", self.microbatch) }
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
            Action::Send(message) => write!(f, "SEND_{message}"),
            Action::Receive(message) => write!(f, "RECV_{message}"),
            Action::Unshard { unit } => write!(f, "UNSHARD {unit}"),
            Action::Reshard { unit } => write!(f, "RESHARD {unit}"),
            Action::ReduceGrad { unit } => write!(f, "REDUCE_GRAD {unit}"),
            Action::UnshardGrad { unit } => write!(f, "UNSHARD_GRAD {unit}"),
            Action::Fetch(state) => write!(f, "FETCH {state}"),
            Action::Evict(state) => write!(f, "EVICT {state}"),
            Action::Step { unit } => write!(f, "STEP {unit}"),
            Action::Stash { unit } => write!(f, "STASH {unit}"),
            Action::Unstash { unit } => write!(f, "UNSTASH {unit}"),
        }
    }
}

/// An action in words; see [`Action::words`].
struct Words(Action);

impl fmt::Display for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Words(action) = self;
        match action {
            Action::Forward { .. } => f.write_str("forward"),
            Action::Recompute { .. } => f.write_str("recomputation"),
            Action::Backward { .. } => f.write_str("backward"),
            Action::BackwardInput { .. } => f.write_str("input half of backward"),
            Action::BackwardWeight { .. } => f.write_str("weight half of backward"),
            Action::Send(message) => write!(f, "send {}", message.kind.words()),
            Action::Receive(message) => write!(f, "receive {}", message.kind.words()),
            Action::Unshard { .. } => f.write_str("gather parameters"),
            Action::Reshard { .. } => f.write_str("free gathered parameters"),
            Action::ReduceGrad { .. } => f.write_str("reduce gradient"),
            Action::UnshardGrad { .. } => f.write_str("gather gradient"),
            Action::Fetch(state) => write!(f, "fetch {}", state.class.words()),
            Action::Evict(state) => write!(f, "evict {}", state.class.words()),
            Action::Step { .. } => f.write_str("update"),
            Action::Stash { .. } => f.write_str("stash parameters"),
            Action::Unstash { .. } => f.write_str("drop stashed parameters"),
        }?;
        write!(f, ", unit {}", action.unit())?;
        action.microbatch().map_or(Ok(()), |microbatch| write!(f, ", microbatch {microbatch}"))
    }
}

impl Action {
    /// The action in words, such as `backward, unit 4, microbatch 1`, for messages to users. Its [`Display`](fmt::Display) is
    /// the compact form of programs, `B 4 1`.
    pub fn words(self) -> impl fmt::Display {
        Words(self)
    }
}

/// The text is not an action.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{0}' is not an action; expected 'F unit microbatch' (optionally followed by 'keep products', 'keep input' or 'keep nothing'), 'R unit \
     microbatch', 'B unit microbatch', 'I unit microbatch', 'W unit microbatch', 'SEND_F unit microbatch', 'RECV_F unit microbatch', 'SEND_B unit microbatch', 'RECV_B unit \
     microbatch', 'SEND_GRAD unit microbatch', 'RECV_GRAD unit microbatch', 'SEND_PARAM unit', 'RECV_PARAM unit', 'UNSHARD unit', 'RESHARD unit', 'REDUCE_GRAD unit', 'UNSHARD_GRAD unit', 'FETCH class unit', 'EVICT class unit', 'STEP unit', 'STASH unit' or 'UNSTASH unit'"
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
            [verb @ ("R" | "B" | "I" | "W"), unit, microbatch] => {
                let (unit, microbatch) = (number(unit)?, number(microbatch)?);
                Ok(match verb {
                    "R" => Action::Recompute { unit, microbatch },
                    "B" => Action::Backward { unit, microbatch },
                    "I" => Action::BackwardInput { unit, microbatch },
                    _ => Action::BackwardWeight { unit, microbatch },
                })
            }
            ["UNSHARD", unit] => Ok(Action::Unshard { unit: number(unit)? }),
            ["RESHARD", unit] => Ok(Action::Reshard { unit: number(unit)? }),
            ["REDUCE_GRAD", unit] => Ok(Action::ReduceGrad { unit: number(unit)? }),
            ["UNSHARD_GRAD", unit] => Ok(Action::UnshardGrad { unit: number(unit)? }),
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
            [verb, unit, ref rest @ ..] if verb.starts_with("SEND_") || verb.starts_with("RECV_") => {
                let (direction, name) = verb.split_at("SEND_".len());
                let kind =
                    MessageKind::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(refuse)?;
                let microbatch = match (kind, rest) {
                    (MessageKind::Parameters, []) => 0,
                    (MessageKind::Parameters, _) => return Err(refuse()),
                    (_, [microbatch]) => number(microbatch)?,
                    _ => return Err(refuse()),
                };
                let message = Message { kind, unit: number(unit)?, microbatch };
                Ok(if direction == "SEND_" { Action::Send(message) } else { Action::Receive(message) })
            }
            ["STEP", unit] => Ok(Action::Step { unit: number(unit)? }),
            ["STASH", unit] => Ok(Action::Stash { unit: number(unit)? }),
            ["UNSTASH", unit] => Ok(Action::Unstash { unit: number(unit)? }),
            _ => Err(refuse()),
        }
    }
}
