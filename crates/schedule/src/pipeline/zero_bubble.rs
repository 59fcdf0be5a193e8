//! Zero-bubble schedules with one stage a rank (Qi et al., "Zero bubble pipeline parallelism", 2023, section 2). Only
//! the input half of backward is awaited by another rank, so the weight half fills what would be a bubble.

use super::pass::Pass;
use super::schedule::{Placement, Schedule};

/// ZB-H1 (section 2.1): no more memory than 1F1B. Rank `r` holds each weight half back by `r` microbatches, so that all
/// ranks have the same number in flight.
///
/// Bubble, for `M >= P` and `W <= min(F, I)`: `(P - 1) (F + I - W)`, a third of 1F1B's where all three take equal time.
/// Activations in flight: `min(P, M)` on every rank, of which the weight halves that wait hold only their part.
pub(super) fn h1(num_ranks: usize, num_microbatches: usize) -> Schedule {
    schedule(num_ranks, num_microbatches, |rank| Lead { num_ahead: num_ranks - rank, num_held_back: rank })
}

/// ZB-H2 (section 2.2): twice the memory, and no bubble. More forwards fill the time until the first backward arrives,
/// and the weight halves that were held back fill the end.
///
/// Bubble, for `M >= 2 P - 1` and `W <= min(F, I)`: `(P - 1) (F + I - 2 W)`, none where all three take equal time. It
/// is counted within each rank, from its first pass to its last: ranks begin and end one after another, and no rank
/// idles between two steps if none waits for all others before its update (section 4 of the paper). A step that ends
/// with a global norm of the gradients takes `(P - 1) F` more. Activations in flight: `min(2 P - 1, M)`.
pub(super) fn h2(num_ranks: usize, num_microbatches: usize) -> Schedule {
    schedule(num_ranks, num_microbatches, |rank| Lead {
        num_ahead: 2 * (num_ranks - rank) - 1,
        num_held_back: 2 * rank,
    })
}

/// How far apart the three passes of a microbatch are on a rank.
struct Lead {
    /// Forwards before the first backward.
    num_ahead: usize,
    /// Input halves by which each weight half waits.
    num_held_back: usize,
}

fn schedule(num_ranks: usize, num_microbatches: usize, lead: impl Fn(usize) -> Lead) -> Schedule {
    let stage_ranks = Placement::Looped.stage_ranks(num_ranks, 1);
    Schedule::synchronous(num_ranks, num_microbatches, stage_ranks, |rank| {
        passes(rank, &lead(rank), num_microbatches)
    })
}

fn passes(stage: usize, lead: &Lead, num_microbatches: usize) -> Vec<Pass> {
    let num_ahead = lead.num_ahead.min(num_microbatches);
    let mut passes: Vec<Pass> = (0..num_ahead).map(|microbatch| Pass::forward(stage, microbatch)).collect();
    for microbatch in 0..num_microbatches {
        passes.push(Pass::backward_input(stage, microbatch));
        if let Some(held_back) = microbatch.checked_sub(lead.num_held_back) {
            passes.push(Pass::backward_weight(stage, held_back));
        }
        if microbatch + num_ahead < num_microbatches {
            passes.push(Pass::forward(stage, microbatch + num_ahead));
        }
    }
    let num_done = num_microbatches.saturating_sub(lead.num_held_back);
    passes.extend((num_done..num_microbatches).map(|microbatch| Pass::backward_weight(stage, microbatch)));
    passes
}
