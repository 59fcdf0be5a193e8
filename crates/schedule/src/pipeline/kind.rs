//! The kinds of schedules and their specifications.

use super::pass::Pass;
use super::schedule::{StagePlacement, WeightVersions};
use super::sizes::Sizes;
use super::{
    breadth_first, dualpipe_v, gpipe, interleaved, one_f_one_b, pipedream, zero_bubble, zero_bubble_v,
};
use std::ops::RangeInclusive;
use trireme_base::named;

named! {
    /// A kind of pipeline schedule.
    pub enum ScheduleKind {
        /// All forwards, then all backwards.
        GPipe = "gpipe",
        /// One forward, one backward.
        OneFOneB = "1f1b",
        /// 1F1B with several stages per rank.
        Interleaved = "interleaved-1f1b",
        /// Zero bubble with the memory of 1F1B.
        ZeroBubbleH1 = "zb-h1",
        /// Zero bubble with twice the memory of 1F1B.
        ZeroBubbleH2 = "zb-h2",
        /// Zero bubble, folded: two stages per rank.
        ZeroBubbleV = "zb-v",
        /// Folded, with forward and backward in pairs.
        DualPipeV = "dualpipe-v",
        /// All microbatches through a stage, then through the rank's next stage.
        BreadthFirst = "breadth-first",
        /// Without drains between steps: weights are stashed.
        PipeDream = "pipedream",
        /// Without drains between steps: two versions of weights.
        PipeDream2Bw = "pipedream-2bw",
        /// A search for the shortest step at given costs and within given memory.
        Automatic = "auto",
    }
}

pub(super) type PassesOfRank = fn(usize, Sizes) -> Vec<Pass>;

/// The generator of a kind of schedule, and the requirements and properties of the kind.
pub(super) struct KindSpec {
    /// The passes of each rank; `None` if they depend on costs.
    pub(super) passes: Option<PassesOfRank>,
    pub(super) placement: StagePlacement,
    pub(super) stages_per_rank: RangeInclusive<usize>,
    /// The kinds to suggest instead if there is one stage per rank and this kind needs more.
    pub(super) for_one_stage: &'static str,
    /// Minimum number of microbatches, by the number of ranks.
    pub(super) microbatches_min: fn(usize) -> usize,
    /// The schedule to suggest for fewer microbatches.
    pub(super) for_few_microbatches: &'static str,
    pub(super) weights: WeightVersions,
}

impl KindSpec {
    /// Returns the spec of a schedule with one stage per rank that drains after each step.
    const fn new(passes: PassesOfRank) -> Self {
        KindSpec {
            passes: Some(passes),
            placement: StagePlacement::Looped,
            stages_per_rank: 1..=1,
            for_one_stage: "",
            microbatches_min: |_| 1,
            for_few_microbatches: "",
            weights: WeightVersions::Drained,
        }
    }

    /// Returns the spec of a folded schedule: two stages per rank, the second in reverse rank order.
    const fn folded(passes: PassesOfRank) -> Self {
        let for_one_stage = "zb-h1 or zb-h2";
        KindSpec {
            placement: StagePlacement::Folded,
            stages_per_rank: 2..=2,
            for_one_stage,
            ..KindSpec::new(passes)
        }
    }
}

impl ScheduleKind {
    pub(super) const fn spec(self) -> KindSpec {
        match self {
            ScheduleKind::GPipe => KindSpec::new(gpipe::passes),
            ScheduleKind::OneFOneB => KindSpec::new(one_f_one_b::passes),
            ScheduleKind::Interleaved => KindSpec {
                stages_per_rank: 2..=usize::MAX,
                for_one_stage: "1f1b",
                ..KindSpec::new(interleaved::passes)
            },
            ScheduleKind::ZeroBubbleH1 => KindSpec::new(zero_bubble::h1),
            ScheduleKind::ZeroBubbleH2 => KindSpec::new(zero_bubble::h2),
            ScheduleKind::ZeroBubbleV => KindSpec::folded(zero_bubble_v::passes),
            ScheduleKind::DualPipeV => KindSpec {
                microbatches_min: |num_ranks| 2 * num_ranks,
                for_few_microbatches: "zb-v",
                ..KindSpec::folded(dualpipe_v::passes)
            },
            ScheduleKind::BreadthFirst => {
                KindSpec { stages_per_rank: 1..=usize::MAX, ..KindSpec::new(breadth_first::passes) }
            }
            ScheduleKind::PipeDream => {
                KindSpec { weights: WeightVersions::Stashed, ..KindSpec::new(pipedream::passes) }
            }
            ScheduleKind::PipeDream2Bw => KindSpec {
                weights: WeightVersions::DoubleBuffered,
                microbatches_min: |num_ranks| num_ranks,
                for_few_microbatches: "pipedream",
                ..KindSpec::new(pipedream::passes)
            },
            ScheduleKind::Automatic => {
                KindSpec { passes: None, stages_per_rank: 1..=usize::MAX, ..KindSpec::new(gpipe::passes) }
            }
        }
    }

    /// Returns every synchronous schedule with each number of stages per rank that it supports, up to `stages_max`.
    pub fn synchronous(stages_max: usize) -> impl Iterator<Item = (ScheduleKind, usize)> {
        let with_stages = move |kind: ScheduleKind| {
            let (least, most) = kind.stages_per_rank().into_inner();
            (least..=most.min(stages_max)).map(move |stages_per_rank| (kind, stages_per_rank))
        };
        ScheduleKind::ALL.into_iter().filter(|kind| kind.is_synchronous()).flat_map(with_stages)
    }

    /// Returns the numbers of stages per rank that the kind supports.
    pub const fn stages_per_rank(self) -> RangeInclusive<usize> {
        self.spec().stages_per_rank
    }

    /// Returns the version of a stage's weights that its passes read.
    pub const fn weights(self) -> WeightVersions {
        self.spec().weights
    }

    /// Returns whether the pipeline drains after every step, so that all microbatches of a step read the same weights.
    pub const fn is_synchronous(self) -> bool {
        matches!(self.weights(), WeightVersions::Drained)
    }
}
