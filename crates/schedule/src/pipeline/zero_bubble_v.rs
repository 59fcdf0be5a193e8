use super::folded::{Chunk, FoldedRank};
use super::pass::Pass;
use super::sizes::Sizes;

/// Returns the passes of a rank in ZB-V (Qi et al., "Zero bubble pipeline parallelism", 2023, section 6; as a repeated building block in Qi
/// et al., "Pipeline parallelism with controllable memory", 2024, section 3): two stages per rank, folded. The rank of the first stage also
/// runs the last stage, so its backward can begin early.
///
/// Bubble, for `M >= 2 P - 1`: none where `F`, `I` and `W` take equal time, counted within each rank from its first pass to its last.
/// Activations in flight: `2 P` stages on every rank. A stage is half of a rank's layers, so this equals 1F1B's `P`.
///
/// With fewer microbatches, the rank runs the schedule for `2 P - 1` microbatches, and leaves out the passes of microbatches that do not
/// exist.
pub(super) fn passes(rank: usize, sizes: Sizes) -> Vec<Pass> {
    let Sizes { num_ranks, num_microbatches, .. } = sizes;
    let mut passes = FoldedRank::new(rank, num_ranks, num_microbatches);
    fill(&mut passes, rank, num_ranks);
    steady(&mut passes, num_microbatches.max(2 * num_ranks - 1));
    drain(&mut passes, rank, num_ranks);
    passes.finish()
}

/// Warm-up, until the rank has run its first backwards.
fn fill(passes: &mut FoldedRank, rank: usize, num_ranks: usize) {
    for _ in 0..2 * (num_ranks - rank) - 1 {
        passes.forward(Chunk::Down);
    }
    for _ in 0..rank {
        passes.forward(Chunk::Up);
        passes.forward(Chunk::Down);
    }
    for _ in 0..num_ranks - rank {
        passes.forward(Chunk::Up);
        passes.backward_input(Chunk::Up);
        passes.backward_weight();
    }
}

/// Steady state: six passes for each microbatch, one of each kind on both stages.
fn steady(passes: &mut FoldedRank, num_microbatches: usize) {
    while passes.num_forward(Chunk::Up) < num_microbatches {
        if passes.num_forward(Chunk::Down) < num_microbatches {
            passes.forward(Chunk::Down);
        }
        passes.backward_input(Chunk::Down);
        passes.backward_weight();
        passes.forward(Chunk::Up);
        passes.backward_input(Chunk::Up);
        passes.backward_weight();
    }
}

/// Cool-down. Other ranks wait for the remaining input halves, so the first `2 * rank` of these run before any delayed weight half.
fn drain(passes: &mut FoldedRank, rank: usize, num_ranks: usize) {
    for _ in 0..rank {
        passes.backward_input(Chunk::Down);
        passes.backward_input(Chunk::Up);
    }
    for _ in 0..num_ranks - rank {
        passes.backward_input(Chunk::Down);
        passes.backward_weight();
    }
}
