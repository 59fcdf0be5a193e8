//! Zero-bubble schedules with one stage a rank (Qi et al., "Zero bubble pipeline parallelism", 2023, section 2). Only
//! the input half of backward is awaited by another rank, so the weight half fills what would be a bubble.

use super::one_f_one_b::by_turns;
use super::pass::Pass;
use super::sizes::Sizes;

/// ZB-H1 (section 2.1): 1F1B's memory. Rank `r` holds weight halves back by `r` microbatches: all ranks have equally many in flight.
///
/// Bubble, for `M >= P` and `W <= min(F, I)`: `(P - 1) (F + I - W)`, a third of 1F1B's where all three take equal time.
/// Activations in flight: `min(P, M)` on every rank, of which the weight halves that wait hold only their part.
pub(super) fn h1(rank: usize, sizes: Sizes) -> Vec<Pass> {
    passes(rank, sizes, sizes.num_ranks - rank, rank)
}

/// ZB-H2 (section 2.2): twice the memory, and no bubble. More forwards fill the time until the first backward arrives,
/// and the weight halves that were held back fill the end.
///
/// Bubble, for `M >= 2 P - 1` and `W <= min(F, I)`: `(P - 1) (F + I - 2 W)`, none where all three take equal time. It
/// is counted within each rank, from its first pass to its last: ranks begin and end one after another, and no rank
/// idles between two steps if none waits for all others before its update (section 4 of the paper). A step that ends
/// with a global norm of the gradients takes `(P - 1) F` more. Activations in flight: `min(2 P - 1, M)`.
pub(super) fn h2(rank: usize, sizes: Sizes) -> Vec<Pass> {
    passes(rank, sizes, 2 * (sizes.num_ranks - rank) - 1, 2 * rank)
}

/// With so many forwards before the first backward, and so many input halves by which each weight half waits.
fn passes(rank: usize, sizes: Sizes, num_ahead: usize, num_held_back: usize) -> Vec<Pass> {
    let microbatches = 0..sizes.num_microbatches;
    let forward = microbatches.clone().map(|microbatch| Pass::forward(rank, microbatch));
    let backward = microbatches.clone().map(|microbatch| {
        let held_back = microbatch.checked_sub(num_held_back);
        let weight_half = held_back.map(|microbatch| Pass::backward_weight(rank, microbatch));
        std::iter::once(Pass::backward_input(rank, microbatch)).chain(weight_half)
    });
    let mut passes = by_turns(num_ahead, forward, backward);
    let num_done = sizes.num_microbatches.saturating_sub(num_held_back);
    passes.extend(microbatches.skip(num_done).map(|microbatch| Pass::backward_weight(rank, microbatch)));
    passes
}
