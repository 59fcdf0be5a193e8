use super::pass::Pass;
use super::sizes::Sizes;

/// Returns the passes of a rank in 1F1B with a flush at the end of a step (PipeDream-flush: Narayanan et al., "Memory-efficient
/// pipeline-parallel DNN training", 2021, section 3.2; DAPPLE: Fan et al., "DAPPLE: a pipelined data parallel approach for training large
/// models", 2021, section 3): backward of a microbatch comes as early as possible, and each backward is followed by one forward.
///
/// Bubble: `(P - 1) (F + B)`, as in GPipe. Activations in flight: `min(P - rank, M)`.
pub(super) fn passes(rank: usize, sizes: Sizes) -> Vec<Pass> {
    let microbatches = 0..sizes.num_microbatches * sizes.num_steps;
    let forward = microbatches.clone().map(|microbatch| Pass::forward(rank, microbatch));
    let backward = microbatches.map(|microbatch| Some(Pass::backward(rank, microbatch)));
    alternate(sizes.num_ranks - rank, forward, backward)
}

/// Returns `num_ahead` forwards, followed by backward of a microbatch (one or more passes) and a forward in alternation.
pub(super) fn alternate<B: IntoIterator<Item = Pass>>(
    num_ahead: usize,
    mut forward: impl Iterator<Item = Pass>,
    backward: impl Iterator<Item = B>,
) -> Vec<Pass> {
    let mut passes: Vec<Pass> = forward.by_ref().take(num_ahead).collect();
    for backward in backward {
        passes.extend(backward);
        passes.extend(forward.next());
    }
    passes
}
