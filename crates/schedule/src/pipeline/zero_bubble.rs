//! Zero-bubble schedules with one stage per rank (Qi et al., "Zero bubble pipeline parallelism", 2023, section 2). Other ranks wait only
//! for the input half of backward, so the weight half can fill bubbles.

use super::one_f_one_b::alternate;
use super::pass::Pass;
use super::sizes::Sizes;

/// Returns the passes of a rank in ZB-H1 (section 2.1), which needs 1F1B's memory. Rank `r` delays weight halves by `r` microbatches, so
/// all ranks have equally many microbatches in flight.
///
/// Bubble, for `M >= P` and `W <= min(F, I)`: `(P - 1) (F + I - W)`, a third of 1F1B's where all three take equal time. Activations in
/// flight: `min(P, M)` on every rank. A microbatch whose weight half is delayed holds only a part of its activations.
pub(super) fn h1(rank: usize, sizes: Sizes) -> Vec<Pass> {
    passes(rank, sizes, sizes.num_ranks - rank, rank)
}

/// Returns the passes of a rank in ZB-H2 (section 2.2), which needs twice the memory and has no bubble. More forwards fill the time until
/// the first backward arrives, and the delayed weight halves fill the end.
///
/// Bubble, for `M >= 2 P - 1` and `W <= min(F, I)`: `(P - 1) (F + I - 2 W)`, none where all three take equal time. The bubble is counted
/// within each rank, from its first pass to its last, because ranks begin and end one after another. Ranks do not idle between two steps,
/// unless they wait for all others before the update (section 4 of the paper): a step that ends with a global norm of the gradients takes
/// `(P - 1) F` more. Activations in flight: `min(2 P - 1, M)`.
pub(super) fn h2(rank: usize, sizes: Sizes) -> Vec<Pass> {
    passes(rank, sizes, 2 * (sizes.num_ranks - rank) - 1, 2 * rank)
}

/// Returns the passes with `num_ahead` forwards before the first backward, and weight halves delayed by `num_held_back` microbatches.
fn passes(rank: usize, sizes: Sizes, num_ahead: usize, num_held_back: usize) -> Vec<Pass> {
    let microbatches = 0..sizes.num_microbatches;
    let forward = microbatches.clone().map(|microbatch| Pass::forward(rank, microbatch));
    let backward = microbatches.clone().map(|microbatch| {
        let held_back = microbatch.checked_sub(num_held_back);
        let weight_half = held_back.map(|microbatch| Pass::backward_weight(rank, microbatch));
        std::iter::once(Pass::backward_input(rank, microbatch)).chain(weight_half)
    });
    let mut passes = alternate(num_ahead, forward, backward);
    let num_done = sizes.num_microbatches.saturating_sub(num_held_back);
    passes.extend(microbatches.skip(num_done).map(|microbatch| Pass::backward_weight(rank, microbatch)));
    passes
}
