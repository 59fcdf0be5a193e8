use super::pass::Pass;
use super::sizes::Sizes;

/// Returns the passes of a rank in the breadth-first schedule (Lamy-Poirier, "Breadth-first pipeline parallelism", 2023, section 4):
/// several stages per rank, in a looped placement. A rank runs all microbatches through a stage before it continues with its next stage. A
/// stage's weights are then gathered once for forward and once for backward, and its gradient is complete early, so that sharded data
/// parallelism is cheap.
///
/// Bubble, for `M >= P`: `(P - 1) (F + B)` of a *stage*, relative `(P - 1) / (V M)`. Activations in flight: `V M` stages, as in GPipe.
pub(super) fn passes(rank: usize, sizes: Sizes) -> Vec<Pass> {
    let Sizes { num_ranks, num_microbatches, stages_per_rank, .. } = sizes;
    let stages = (0..stages_per_rank).map(|turn| turn * num_ranks + rank);
    let each = |pass: fn(usize, usize) -> Pass| {
        move |stage| (0..num_microbatches).map(move |microbatch| pass(stage, microbatch))
    };
    let forward = stages.clone().flat_map(each(Pass::forward));
    forward.chain(stages.rev().flat_map(each(Pass::backward))).collect()
}
