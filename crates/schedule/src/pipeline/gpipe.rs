use super::pass::Pass;
use super::sizes::Sizes;

/// Returns the passes of a rank in GPipe (Huang et al., "GPipe: efficient training of giant neural networks using pipeline parallelism",
/// 2019, section 2.3): all forwards, then all backwards.
///
/// Bubble: `(P - 1) (F + B)`, relative to an ideal time of `M (F + B)`: `(P - 1) / M`. The paper states the same loss relative to the whole
/// time: `(P - 1) / (M + P - 1)`. Activations in flight: `M` on every rank.
pub(super) fn passes(rank: usize, sizes: Sizes) -> Vec<Pass> {
    let microbatches = 0..sizes.num_microbatches;
    let forward = microbatches.clone().map(|microbatch| Pass::forward(rank, microbatch));
    forward.chain(microbatches.map(|microbatch| Pass::backward(rank, microbatch))).collect()
}
