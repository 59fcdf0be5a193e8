use super::schedule::WeightVersions;
use std::ops::RangeInclusive;
use trireme_base::named;

named! {
    /// The schedules that there are.
    pub enum Kind {
        /// All forwards, then all backwards.
        GPipe = "gpipe",
        /// One forward, one backward.
        OneFOneB = "1f1b",
        /// 1F1B with several stages a rank.
        Interleaved = "interleaved-1f1b",
        /// Zero bubble with 1F1B's memory.
        ZeroBubbleH1 = "zb-h1",
        /// Zero bubble with twice that.
        ZeroBubbleH2 = "zb-h2",
        /// Zero bubble, folded: two stages a rank, there and back.
        ZeroBubbleV = "zb-v",
        /// Folded, with forward and backward in pairs.
        DualPipeV = "dualpipe-v",
        /// All microbatches through a stage, then the rank's next stage.
        BreadthFirst = "breadth-first",
        /// Without drains: weights are stashed.
        PipeDream = "pipedream",
        /// Without drains: two versions of weights.
        PipeDream2Bw = "pipedream-2bw",
        /// A search for the shortest step at given costs and within given memory.
        Automatic = "auto",
    }
}

impl Kind {
    /// Every synchronous schedule, with each number of stages a rank that it can have, up to `stages_max`.
    pub fn synchronous(stages_max: usize) -> impl Iterator<Item = (Kind, usize)> {
        let with_stages = move |kind: Kind| {
            let (least, most) = kind.stages_per_rank().into_inner();
            (least..=most.min(stages_max)).map(move |stages_per_rank| (kind, stages_per_rank))
        };
        Kind::ALL.into_iter().filter(|kind| kind.is_synchronous()).flat_map(with_stages)
    }

    /// The numbers of stages that a rank can have.
    pub const fn stages_per_rank(self) -> RangeInclusive<usize> {
        match self {
            Kind::Interleaved => 2..=usize::MAX,
            Kind::ZeroBubbleV | Kind::DualPipeV => 2..=2,
            Kind::BreadthFirst | Kind::Automatic => 1..=usize::MAX,
            _ => 1..=1,
        }
    }

    /// Which version of its weights a stage reads.
    pub const fn weights(self) -> WeightVersions {
        match self {
            Kind::PipeDream => WeightVersions::Stashed,
            Kind::PipeDream2Bw => WeightVersions::DoubleBuffered,
            _ => WeightVersions::Drained,
        }
    }

    /// Whether the pipeline drains after every step, so that all microbatches of a step read the same weights.
    pub const fn is_synchronous(self) -> bool {
        matches!(self.weights(), WeightVersions::Drained)
    }
}
