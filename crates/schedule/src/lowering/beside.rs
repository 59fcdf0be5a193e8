//! Inserts actions before and after the actions of a program.

use crate::action::Action;

/// For each action, the actions to insert right before and right after it.
pub(super) type Beside = Vec<[Vec<Action>; 2]>;

pub(super) fn nothing_beside(actions: &[Action]) -> Beside {
    vec![Default::default(); actions.len()]
}

/// Returns the actions with those of `beside` inserted.
pub(super) fn put_beside(actions: &[Action], beside: Beside) -> Vec<Action> {
    let with = |(&action, [before, after]): (_, [Vec<_>; 2])| before.into_iter().chain([action]).chain(after);
    actions.iter().zip(beside).flat_map(with).collect()
}

/// Returns the indices of the actions that match.
pub(super) fn places(actions: &[Action], is_one: impl Fn(Action) -> bool) -> Vec<usize> {
    (0..actions.len()).filter(|&place| is_one(actions[place])).collect()
}
