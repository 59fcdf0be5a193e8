//! Inserts actions before and after the actions of a program.

use crate::action::Action;

/// For each action, the actions to insert right before and right after it.
pub(super) type Insertions = Vec<[Vec<Action>; 2]>;

pub(super) fn no_insertions(actions: &[Action]) -> Insertions {
    vec![Default::default(); actions.len()]
}

/// Returns the actions, with the insertions before and after each of them.
pub(super) fn insert(actions: &[Action], insertions: Insertions) -> Vec<Action> {
    let with = |(&action, [before, after]): (_, [Vec<_>; 2])| before.into_iter().chain([action]).chain(after);
    actions.iter().zip(insertions).flat_map(with).collect()
}

/// Returns the indices of the actions that match.
pub(super) fn indices_of(actions: &[Action], is_wanted: impl Fn(Action) -> bool) -> Vec<usize> {
    (0..actions.len()).filter(|&place| is_wanted(actions[place])).collect()
}
