//! Lowering passes: each adds actions that a layout requires to a program, and returns a program with the same results.
//! [`recompute`](fn@recompute) comes before [`lay_out`], because recomputation reads parameters, too.
//!
//! A requirement that is independent of the pipeline schedule is a pass here, from a program to a program, and not an option of the
//! generators.

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
/// If the program has a layout already, or there is [no program](StateLayout::is_possible) for the layout.
pub fn lay_out(program: Program, state: StateLayout) -> Program {
    let Program { header, actions } = program;
    assert_eq!(header.state, StateLayout::UNSHARDED, "the program is laid out already");
    assert!(state.is_possible(header.num_microbatches), "no program of this layout:{state}");
    let header = ProgramHeader { state: state.normalized(), ..header };
    let actions = offload::offload(&header, shard::shard(&header, actions));
    Program { header, actions }
}
