//! The text form of actions: one line of a program.

use super::{Action, Keep, Message, MessageKind, StateClass, StateKey};
use crate::parse::ParseError;
use std::fmt;
use std::str::FromStr;

impl Action {
    /// Returns the action in words for users, such as `backward, unit 4, microbatch 1`. [`Display`](fmt::Display) writes `B 4 1`.
    pub fn words(self) -> impl fmt::Display {
        Words(self)
    }

    /// Returns the action's name in programs and in words, without its [object](Action::object).
    const fn names(self) -> (&'static str, &'static str) {
        match self {
            Action::Forward { .. } => ("F", "forward"),
            Action::Recompute { .. } => ("R", "recomputation"),
            Action::Backward { .. } => ("B", "backward"),
            Action::BackwardInput { .. } => ("I", "input half of backward"),
            Action::BackwardWeight { .. } => ("W", "weight half of backward"),
            Action::Send(_) => ("SEND_", "send "),
            Action::Receive(_) => ("RECV_", "receive "),
            Action::Unshard { .. } => ("UNSHARD", "gather parameters"),
            Action::Reshard { .. } => ("RESHARD", "free gathered parameters"),
            Action::ReduceGrad { .. } => ("REDUCE_GRAD", "reduce gradient"),
            Action::UnshardGrad { .. } => ("UNSHARD_GRAD", "gather gradient"),
            Action::Fetch(_) => ("FETCH ", "fetch "),
            Action::Evict(_) => ("EVICT ", "evict "),
            Action::Step { .. } => ("STEP", "update"),
            Action::Stash { .. } => ("STASH", "stash parameters"),
            Action::Unstash { .. } => ("UNSTASH", "drop stashed parameters"),
        }
    }

    /// Returns the name of the message that is sent or received, or of the state that is moved, in programs and in words. Empty for other
    /// actions.
    const fn object(self) -> (&'static str, &'static str) {
        match self {
            Action::Send(Message { kind, .. }) | Action::Receive(Message { kind, .. }) => {
                (kind.name(), kind.words())
            }
            Action::Fetch(StateKey { class, .. }) | Action::Evict(StateKey { class, .. }) => {
                (class.name(), class.words())
            }
            _ => ("", ""),
        }
    }

    /// Returns every kind of action for one unit and microbatch.
    fn kinds(unit: usize, microbatch: usize, keep: Keep) -> impl Iterator<Item = Action> {
        let others = [
            Action::Forward { unit, microbatch, keep },
            Action::Recompute { unit, microbatch },
            Action::Backward { unit, microbatch },
            Action::BackwardInput { unit, microbatch },
            Action::BackwardWeight { unit, microbatch },
            Action::Unshard { unit },
            Action::Reshard { unit },
            Action::ReduceGrad { unit },
            Action::UnshardGrad { unit },
            Action::Step { unit },
            Action::Stash { unit },
            Action::Unstash { unit },
        ];
        let messages = MessageKind::ALL.map(|kind| Message { kind, unit, microbatch });
        let states = StateClass::ALL.map(|class| StateKey { class, unit, microbatch });
        let messages =
            messages.into_iter().flat_map(|message| [Action::Send(message), Action::Receive(message)]);
        let moves = states.into_iter().flat_map(|state| [Action::Fetch(state), Action::Evict(state)]);
        others.into_iter().chain(messages).chain(moves)
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{} {}", self.names().0, self.object().0, self.unit())?;
        self.microbatch().map_or(Ok(()), |microbatch| write!(f, " {microbatch}"))?;
        match self {
            Action::Forward { keep, .. } if *keep != Keep::All => write!(f, " keep {keep}"),
            _ => Ok(()),
        }
    }
}

struct Words(Action);

impl fmt::Display for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Words(action) = self;
        write!(f, "{}{}, unit {}", action.names().1, action.object().1, action.unit())?;
        action.microbatch().map_or(Ok(()), |microbatch| write!(f, ", microbatch {microbatch}"))
    }
}

impl FromStr for Action {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        parse(text).ok_or_else(|| {
            ParseError(format!(
                "'{text}' is not an action; expected 'F unit microbatch' (optionally followed by 'keep products', 'keep input' or \
                 'keep nothing'), R, B, I or W with unit and microbatch, SEND_ or RECV_ with F, B or GRAD, unit and microbatch, \
                 'SEND_PARAM unit', 'RECV_PARAM unit', UNSHARD, RESHARD, REDUCE_GRAD, UNSHARD_GRAD, STEP, STASH or UNSTASH with a \
                 unit, FETCH or EVICT with optimizer, parameters or gradients and a unit, or with activations, unit and microbatch"
            ))
        })
    }
}

fn parse(text: &str) -> Option<Action> {
    let words: Vec<&str> = text.split_whitespace().collect();
    let (words, keep) = match &words[..] {
        [words @ .., "keep", keep] => (words, Some(Keep::named(keep)?)),
        words => (words, None),
    };
    let is_number = |word: &&str| word.parse::<usize>().is_ok();
    let (name, numbers) = words.split_at(words.iter().position(is_number)?);
    let numbers: Vec<usize> = numbers.iter().map(|word| word.parse().ok()).collect::<Option<_>>()?;
    let (unit, microbatch) = (numbers[0], numbers.get(1).copied());
    let name = name.join(" ");
    let is_named = |action: &Action| name.strip_prefix(action.names().0) == Some(action.object().0);
    let action = Action::kinds(unit, microbatch.unwrap_or(0), keep.unwrap_or_default()).find(is_named)?;
    let is_whole = action.microbatch() == microbatch && numbers.len() <= 2;
    (is_whole && (keep.is_none() || matches!(action, Action::Forward { .. }))).then_some(action)
}
