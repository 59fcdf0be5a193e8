//! Asynchronous schedules: 1F1B without a drain between steps. A stage updates its weights as soon as it has run backward of a step's last
//! microbatch, while forwards of later steps are in flight with older weights.
//!
//! A step is `M` microbatches and one update of every stage. The pipeline drains after all steps of the schedule, for example before a
//! checkpoint or a validation. Backward of a microbatch reads the same weights as its forward.
//!
//! # PipeDream
//! PipeDream (Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", 2019, sections 3.2 and 3.3; Harlap et al.,
//! 2018): forward reads the newest weights, which are stashed until backward of the microbatch.
//!
//! The staleness of a gradient is the number of updates between the weights at which it was computed and the weights to which it is
//! applied. Stage `s` runs `P - 1 - s` backwards of other microbatches between forward and backward of a microbatch, so its staleness is at
//! most `ceil((P - 1 - s) / M)`. The paper updates after every microbatch, which is `M = 1`: staleness `P - 1 - s`. Weight versions: one
//! more than the staleness. Stages may read different versions for one microbatch (the paper's vertical sync is not implemented).
//!
//! Bubble: `(P - 1) (F + B)` for all steps together. Activations in flight: `P - s`.
//!
//! # PipeDream-2BW
//! PipeDream-2BW (Narayanan et al., "Memory-efficient pipeline-parallel DNN training", 2021, section 3.1): every microbatch of step `k`
//! reads the weights that the update of step `k - 2` produced, on all stages.
//!
//! The staleness is 1 everywhere, except in the first step, where it is 0. Weight versions: 2, for any number of ranks. Requires `M >= P`,
//! because otherwise a step would begin before the update that it reads. Bubble and activations are the same as in PipeDream.

use super::one_f_one_b;
use super::pass::{Pass, PassKind};
use super::sizes::Sizes;

/// Returns the passes of 1F1B, with an update after backward of each step's last microbatch.
pub(super) fn passes(rank: usize, sizes: Sizes) -> Vec<Pass> {
    let update_after = |pass: &Pass| {
        let is_last =
            pass.kind == PassKind::Backward && (pass.microbatch + 1).is_multiple_of(sizes.num_microbatches);
        is_last.then_some(Pass::update(pass.stage, pass.microbatch))
    };
    let passes = one_f_one_b::passes(rank, sizes).into_iter();
    passes.flat_map(|pass| [Some(pass), update_after(&pass)]).flatten().collect()
}
