//! Asynchronous schedules: 1F1B without a drain between steps. A stage updates its weights as soon as it has done
//! backward of a step's last microbatch, while forwards of later steps are on their way with older weights.
//!
//! A step is `M` microbatches and one update of every stage, and the pipeline drains after all steps of the schedule:
//! before a checkpoint or a validation, say. Backward of a microbatch reads the weights that its forward read.

use super::one_f_one_b;
use super::pass::{Pass, PassKind};
use super::schedule::{Placement, Schedule, WeightVersions};

/// PipeDream (Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", 2019, sections 3.2 and
/// 3.3; Harlap et al., 2018): forward reads the newest weights, which are stashed until backward of the microbatch.
///
/// The staleness of a gradient is the number of updates between the weights that it was taken at and those that it is
/// applied to. Stage `s` does `P - 1 - s` backwards of other microbatches between forward and backward of one, so it
/// is at most `ceil((P - 1 - s) / M)`. The paper updates after every microbatch, which is `M = 1`: staleness `P - 1 -
/// s`. Weight versions: one more than the staleness. Stages may read different versions for one microbatch (the
/// paper's vertical sync is not done).
///
/// Bubble: `(P - 1) (F + B)` for all steps together. Activations in flight: `P - s`.
pub(super) fn stashed(num_ranks: usize, num_microbatches: usize, num_steps: usize) -> Schedule {
    schedule(num_ranks, num_microbatches, num_steps, WeightVersions::Stashed)
}

/// PipeDream-2BW (Narayanan et al., "Memory-efficient pipeline-parallel DNN training", 2021, section 3.1): every
/// microbatch of a step reads the weights that the step before the last one has made, on all stages.
///
/// Staleness is 1 everywhere, but for the first step, whose weights are fresh. Weight versions: 2, whatever the number
/// of ranks. It needs `M >= P`, or a step would begin before the update that it reads. Bubble and activations as
/// PipeDream's.
pub(super) fn double_buffered(num_ranks: usize, num_microbatches: usize, num_steps: usize) -> Schedule {
    schedule(num_ranks, num_microbatches, num_steps, WeightVersions::DoubleBuffered)
}

fn schedule(
    num_ranks: usize,
    num_microbatches: usize,
    num_steps: usize,
    weights: WeightVersions,
) -> Schedule {
    let passes = |stage: usize| {
        let passes = one_f_one_b::passes(stage, num_ranks - stage, num_microbatches * num_steps);
        passes
            .into_iter()
            .flat_map(|pass| [Some(pass), update_after(pass, num_microbatches)])
            .flatten()
            .collect()
    };
    Schedule {
        num_microbatches,
        num_steps,
        weights,
        stage_ranks: Placement::Looped.stage_ranks(num_ranks, 1),
        ranks: (0..num_ranks).map(passes).collect(),
    }
}

/// The update that follows backward of a step's last microbatch.
fn update_after(pass: Pass, num_microbatches: usize) -> Option<Pass> {
    let is_last = pass.kind == PassKind::Backward && (pass.microbatch + 1).is_multiple_of(num_microbatches);
    is_last.then_some(Pass::update(pass.stage, pass.microbatch))
}
