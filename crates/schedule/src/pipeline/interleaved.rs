use super::one_f_one_b::alternate;
use super::pass::Pass;
use super::sizes::Sizes;

/// Returns the passes of a rank in interleaved 1F1B (Narayanan et al., "Efficient large-scale language model training on GPU clusters using
/// Megatron-LM", 2021, section 2.2): several stages per rank in a looped placement, and groups of `P` microbatches, each of which passes
/// through all stages before the next.
///
/// If `P` does not divide `M`, groups are larger, and the largest come first. With fewer than `P` microbatches, there is one group. The
/// first group determines how far forwards run ahead. Because it is the largest, every forward comes before its backward.
///
/// Bubble, for `M >= P`: `(P - 1) (F + B)` of a *stage*, which is `1 / V` of a rank's work: `(P - 1) / (V M)`. There are `V` times as many
/// messages. Activations in flight: `min(2 (P - rank - 1) + (V - 1) G + 1, V M)` stages, with `G` the size of the first group.
pub(super) fn passes(rank: usize, sizes: Sizes) -> Vec<Pass> {
    let Sizes { num_ranks, num_microbatches, stages_per_rank, .. } = sizes;
    let groups = groups(num_ranks, num_microbatches);
    let stages: Vec<usize> = (0..stages_per_rank).map(|turn| turn * num_ranks + rank).collect();
    let backwards: Vec<usize> = stages.iter().rev().copied().collect();
    let num_ahead = 2 * (num_ranks - rank - 1) + (stages_per_rank - 1) * groups[0].len() + 1;
    let forward = in_groups(&groups, &stages).map(|(stage, number)| Pass::forward(stage, number));
    let backward = in_groups(&groups, &backwards).map(|(stage, number)| Some(Pass::backward(stage, number)));
    alternate(num_ahead, forward, backward)
}

/// Returns the microbatches in groups of at least `num_ranks`, as even as possible, larger groups first.
fn groups(num_ranks: usize, num_microbatches: usize) -> Vec<std::ops::Range<usize>> {
    let num_groups = (num_microbatches / num_ranks).max(1);
    let (len, num_longer) = (num_microbatches / num_groups, num_microbatches % num_groups);
    let begin = |group: usize| group * len + group.min(num_longer);
    (0..num_groups).map(|group| begin(group)..begin(group + 1)).collect()
}

/// Returns every stage and microbatch: group by group, and stage by stage within a group.
fn in_groups<'a>(
    groups: &'a [std::ops::Range<usize>],
    stages: &'a [usize],
) -> impl Iterator<Item = (usize, usize)> + 'a {
    let within = |group: &'a std::ops::Range<usize>| {
        stages.iter().flat_map(move |&stage| group.clone().map(move |microbatch| (stage, microbatch)))
    };
    groups.iter().flat_map(within)
}
