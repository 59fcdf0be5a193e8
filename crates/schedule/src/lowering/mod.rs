//! Passes that put into a program what a layout asks for. Each takes a program and gives another one that computes the same;
//! [`recompute`](fn@recompute) comes before [`lay_out`], for what is recomputed reads parameters, too.

mod offload;
mod recompute;
mod shard;

pub use recompute::recompute;

use crate::action::Action;
use crate::layout::StateLayout;
use crate::program::{Outline, Program};

/// Adds the gathers, reductions, fetches and evictions that a layout of state requires to a program whose state is whole and on the
/// device.
///
/// # Panics
/// If the program is laid out already, or there is [no program](StateLayout::is_possible) for the layout.
pub fn lay_out(program: Program, state: StateLayout) -> Program {
    let Program { outline, actions } = program;
    assert_eq!(outline.state, StateLayout::WHOLE, "the program is laid out already");
    assert!(state.is_possible(outline.num_microbatches), "no program of this layout:{state}");
    let outline = Outline { state: state.normalized(), ..outline };
    let actions = offload::offload(&outline, shard::shard(&outline, actions));
    Program { outline, actions }
}

/// For each action: what is put right before and right after it.
type Beside = Vec<[Vec<Action>; 2]>;

fn nothing_beside(actions: &[Action]) -> Beside {
    vec![Default::default(); actions.len()]
}

/// The actions, with others right before and right after each.
fn put_beside(actions: &[Action], beside: Beside) -> Vec<Action> {
    let with = |(&action, [before, after]): (_, [Vec<_>; 2])| before.into_iter().chain([action]).chain(after);
    actions.iter().zip(beside).flat_map(with).collect()
}

/// The places of the actions that are of a kind.
fn places(actions: &[Action], is_one: impl Fn(Action) -> bool) -> Vec<usize> {
    (0..actions.len()).filter(|&place| is_one(actions[place])).collect()
}
