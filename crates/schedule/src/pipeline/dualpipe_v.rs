use super::folded::{Chunk, FoldedRank};
use super::pass::Pass;
use super::sizes::Sizes;

/// Returns the passes of a rank in DualPipeV (Sea AI Lab, "DualPipe could be better without the Dual", 2025), which cuts DualPipe
/// (DeepSeek-AI, "DeepSeek-V3 technical report", 2024, section 3.2.1) in half: two stages per rank, folded. In the steady state, forward of
/// one stage and backward of the other form pairs, so that the communication within one (of expert parallelism, for example) can overlap
/// with the computation of the other. Here the passes of a pair run one after the other, forward first, because a rank computes one pass at
/// a time.
///
/// Bubble, where `F`, `I` and `W` take equal time: `(P - 1) F`. The authors' formula, `(P - 1) (F&B + B - 3 W)` with `F&B` the time of a
/// pair, is for pairs that run as one pass and give both results at their end. If the passes run one after the other, the result of forward
/// is sent before backward begins. Activations in flight: `2 P + 1` stages, each of which is half of a rank's layers. Requires `M >= 2 P`.
pub(super) fn passes(rank: usize, sizes: Sizes) -> Vec<Pass> {
    let Sizes { num_ranks, num_microbatches, .. } = sizes;
    let mut passes = FoldedRank::new(rank, num_ranks, num_microbatches);
    let num_below = num_ranks - rank - 1;
    fill(&mut passes, rank, num_below);
    steady(&mut passes, num_microbatches - 2 * num_ranks + rank + 1, num_below);
    drain(&mut passes, rank, num_below);
    passes.finish()
}

/// Warm-up. `num_below` is the number of ranks between this rank and the fold.
fn fill(passes: &mut FoldedRank, rank: usize, num_below: usize) {
    for _ in 0..2 * num_below {
        passes.forward(Chunk::Down);
    }
    for _ in 0..=rank {
        passes.forward(Chunk::Down);
        passes.forward(Chunk::Up);
    }
    for _ in 0..num_below {
        passes.backward_input(Chunk::Up);
        passes.backward_weight();
        passes.forward(Chunk::Up);
    }
}

fn steady(passes: &mut FoldedRank, num_pairs: usize, num_below: usize) {
    for _ in 0..num_pairs {
        passes.forward(Chunk::Down);
        passes.backward(Chunk::Up);
        passes.forward(Chunk::Up);
        passes.backward(Chunk::Down);
    }
    for _ in 0..num_below {
        passes.backward(Chunk::Up);
        passes.forward(Chunk::Up);
        passes.backward(Chunk::Down);
    }
}

/// Cool-down: only backward passes are left. In the second half of them, input halves run before weight halves, so that other ranks get the
/// results early.
fn drain(passes: &mut FoldedRank, rank: usize, num_below: usize) {
    let backwards = (0..=rank).flat_map(|_| [Chunk::Up, Chunk::Down]);
    for (place, chunk) in backwards.enumerate() {
        if place <= rank {
            passes.backward(chunk);
        } else {
            passes.backward_input(chunk);
        }
    }
    for _ in 0..num_below {
        passes.backward_weight();
        passes.backward_input(Chunk::Down);
    }
}
