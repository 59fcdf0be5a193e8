use super::pass::Pass;
use super::schedule::{Placement, Schedule};

/// GPipe (Huang et al., "GPipe: efficient training of giant neural networks using pipeline parallelism", 2019, section
/// 2.3): all forwards, then all backwards.
///
/// Bubble: `(P - 1) (F + B)`, over an ideal time of `M (F + B)`: `(P - 1) / M`. The paper counts `(P - 1) / (M + P -
/// 1)` of the whole time, which is the same. Activations in flight: `M` on every rank.
pub(super) fn schedule(num_ranks: usize, num_microbatches: usize) -> Schedule {
    let stage_ranks = Placement::Looped.stage_ranks(num_ranks, 1);
    Schedule::synchronous(num_ranks, num_microbatches, stage_ranks, |rank| {
        let forward = (0..num_microbatches).map(|microbatch| Pass::forward(rank, microbatch));
        let backward = (0..num_microbatches).map(|microbatch| Pass::backward(rank, microbatch));
        forward.chain(backward).collect()
    })
}
