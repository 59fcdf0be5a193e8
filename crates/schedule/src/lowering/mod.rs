//! Lowering passes. Each takes a program and adds the actions that a layout requires. The results of the program do not change.
//! [`recompute`](fn@recompute) must run before [`apply_layout`], because recomputation reads parameters, too.
//!
//! A requirement that does not depend on the pipeline schedule is a lowering pass, not an option of the schedule generators.

mod early_updates;
mod insertions;
mod offload;
mod recompute;
mod shard;

pub use recompute::recompute;

use crate::layout::StateLayout;
use crate::program::{Program, ProgramHeader};

/// Adds the gathers, reductions, fetches and evictions of a layout to a program whose state is unsharded and on the device.
///
/// # Panics
/// If the program has a layout already, if there is [no program](StateLayout::is_possible) for the layout, or if a pipeline is to update
/// early.
pub fn apply_layout(program: Program, state: StateLayout) -> Program {
    let Program { header, actions } = program;
    assert_eq!(header.state, StateLayout::UNSHARDED, "the program has a layout already");
    assert!(state.is_possible(header.num_microbatches), "no program of this layout:{state}");
    // In a pipeline, the ranks below would wait for the updates of the ranks above.
    assert!(header.stages.is_empty() || !state.updates_early, "a pipeline cannot update early");
    let header = ProgramHeader { state: state.normalized(), ..header };
    let actions = if header.state.updates_early { early_updates::update_early(actions) } else { actions };
    let actions = offload::offload(&header, shard::shard(&header, actions));
    Program { header, actions }
}
