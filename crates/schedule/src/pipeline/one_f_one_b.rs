use super::pass::Pass;
use super::schedule::{Placement, Schedule};

/// 1F1B, with a flush at the end of a step (PipeDream-flush: Narayanan et al., "Memory-efficient pipeline-parallel DNN
/// training", 2021, section 3.2; DAPPLE: Fan et al., "DAPPLE: a pipelined data parallel approach for training large
/// models", 2021, section 3): backward of a microbatch comes as early as it can, and one forward follows each.
///
/// Bubble: `(P - 1) (F + B)`, as GPipe's. Activations in flight: `min(P - rank, M)`.
pub(super) fn schedule(num_ranks: usize, num_microbatches: usize) -> Schedule {
    let stage_ranks = Placement::Looped.stage_ranks(num_ranks, 1);
    Schedule::synchronous(num_ranks, num_microbatches, stage_ranks, |rank| {
        passes(rank, num_ranks - rank, num_microbatches)
    })
}

/// The passes of a stage that keeps at most `in_flight_max` microbatches.
pub(super) fn passes(stage: usize, in_flight_max: usize, num_microbatches: usize) -> Vec<Pass> {
    let num_ahead = in_flight_max.min(num_microbatches);
    let mut passes: Vec<Pass> = (0..num_ahead).map(|microbatch| Pass::forward(stage, microbatch)).collect();
    for microbatch in 0..num_microbatches {
        passes.push(Pass::backward(stage, microbatch));
        if microbatch + num_ahead < num_microbatches {
            passes.push(Pass::forward(stage, microbatch + num_ahead));
        }
    }
    passes
}
