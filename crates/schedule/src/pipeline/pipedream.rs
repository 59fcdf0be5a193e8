//! Asynchronous schedules: 1F1B without a drain between steps. A stage updates its weights as soon as it has done backward of a
//! step's last microbatch, while forwards of later steps are on their way with older weights.
//!
//! A step is `M` microbatches and one update of every stage, and the pipeline drains after all steps of the schedule: before a
//! checkpoint or a validation, say. Backward of a microbatch reads the weights that its forward read.
//!
//! # PipeDream
//! PipeDream (Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", 2019, sections 3.2 and 3.3; Harlap
//! et al., 2018): forward reads the newest weights, which are stashed until backward of the microbatch.
//!
//! The staleness of a gradient is the number of updates between the weights that it was taken at and those that it is applied to.
//! Stage `s` does `P - 1 - s` backwards of other microbatches between forward and backward of one, so it is at most `ceil((P - 1 -
//! s) / M)`. The paper updates after every microbatch, which is `M = 1`: staleness `P - 1 - s`. Weight versions: one more than the
//! staleness. Stages may read different versions for one microbatch (the paper's vertical sync is not done).
//!
//! Bubble: `(P - 1) (F + B)` for all steps together. Activations in flight: `P - s`.
//!
//! # PipeDream-2BW
//! PipeDream-2BW (Narayanan et al., "Memory-efficient pipeline-parallel DNN training", 2021, section 3.1): every microbatch of a
//! step reads the weights that the step before the last one has made, on all stages.
//!
//! Staleness is 1 everywhere, but for the first step, whose weights are fresh. Weight versions: 2, whatever the number of ranks.
//! It needs `M >= P`, or a step would begin before the update that it reads. Bubble and activations as PipeDream's.

use super::one_f_one_b;
use super::pass::{Pass, PassKind};
use super::sizes::Sizes;

/// Those of 1F1B, with an update after backward of a step's last microbatch.
pub(super) fn passes(rank: usize, sizes: Sizes) -> Vec<Pass> {
    let update_after = |pass: &Pass| {
        let is_last =
            pass.kind == PassKind::Backward && (pass.microbatch + 1).is_multiple_of(sizes.num_microbatches);
        is_last.then_some(Pass::update(pass.stage, pass.microbatch))
    };
    let passes = one_f_one_b::passes(rank, sizes).into_iter();
    passes.flat_map(|pass| [Some(pass), update_after(&pass)]).flatten().collect()
}
