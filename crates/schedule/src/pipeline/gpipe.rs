use super::pass::Pass;
use super::sizes::Sizes;

/// GPipe (Huang et al., "GPipe: efficient training of giant neural networks using pipeline parallelism", 2019, section
/// 2.3): all forwards, then all backwards.
///
/// Bubble: `(P - 1) (F + B)`, over an ideal time of `M (F + B)`: `(P - 1) / M`. The paper counts `(P - 1) / (M + P -
/// 1)` of the whole time, which is the same. Activations in flight: `M` on every rank.
pub(super) fn passes(rank: usize, sizes: Sizes) -> Vec<Pass> {
    let microbatches = 0..sizes.num_microbatches;
    let forward = microbatches.clone().map(|microbatch| Pass::forward(rank, microbatch));
    forward.chain(microbatches.map(|microbatch| Pass::backward(rank, microbatch))).collect()
}
