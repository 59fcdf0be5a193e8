use std::fmt;
use std::str::FromStr;

/// The schedules that there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// All forwards, then all backwards.
    GPipe,
    /// One forward, one backward.
    OneFOneB,
    /// 1F1B with several stages a rank.
    Interleaved,
    /// Zero bubble with 1F1B's memory.
    ZeroBubbleH1,
    /// Zero bubble with twice that.
    ZeroBubbleH2,
    /// Zero bubble, folded: two stages a rank, there and back.
    ZeroBubbleV,
    /// Folded, with forward and backward in pairs.
    DualPipeV,
    /// All microbatches through a stage, then the rank's next stage.
    BreadthFirst,
    /// Without drains: weights are stashed.
    PipeDream,
    /// Without drains: two versions of weights.
    PipeDream2Bw,
    /// Whatever takes least time by the costs at hand, within the memory at hand.
    Automatic,
}

impl Kind {
    /// Every schedule.
    pub const ALL: [Kind; 11] = [
        Kind::GPipe,
        Kind::OneFOneB,
        Kind::Interleaved,
        Kind::ZeroBubbleH1,
        Kind::ZeroBubbleH2,
        Kind::ZeroBubbleV,
        Kind::DualPipeV,
        Kind::BreadthFirst,
        Kind::PipeDream,
        Kind::PipeDream2Bw,
        Kind::Automatic,
    ];

    /// Every synchronous schedule, with each number of stages a rank that it can have, up to `stages_max`.
    pub fn synchronous(stages_max: usize) -> impl Iterator<Item = (Kind, usize)> {
        let with_stages = move |kind: Kind| {
            let (least, most) = kind.stages_per_rank();
            (least..=most.min(stages_max)).map(move |stages_per_rank| (kind, stages_per_rank))
        };
        Kind::ALL.into_iter().filter(|kind| kind.is_synchronous()).flat_map(with_stages)
    }

    /// Name in configs.
    pub const fn name(self) -> &'static str {
        match self {
            Kind::GPipe => "gpipe",
            Kind::OneFOneB => "1f1b",
            Kind::Interleaved => "interleaved-1f1b",
            Kind::ZeroBubbleH1 => "zb-h1",
            Kind::ZeroBubbleH2 => "zb-h2",
            Kind::ZeroBubbleV => "zb-v",
            Kind::DualPipeV => "dualpipe-v",
            Kind::BreadthFirst => "breadth-first",
            Kind::PipeDream => "pipedream",
            Kind::PipeDream2Bw => "pipedream-2bw",
            Kind::Automatic => "auto",
        }
    }

    /// Stages that a rank has: the least and the most.
    pub const fn stages_per_rank(self) -> (usize, usize) {
        match self {
            Kind::Interleaved => (2, usize::MAX),
            Kind::ZeroBubbleV | Kind::DualPipeV => (2, 2),
            Kind::BreadthFirst | Kind::Automatic => (1, usize::MAX),
            Kind::GPipe
            | Kind::OneFOneB
            | Kind::ZeroBubbleH1
            | Kind::ZeroBubbleH2
            | Kind::PipeDream
            | Kind::PipeDream2Bw => (1, 1),
        }
    }

    /// Whether the pipeline drains after every step, so that all microbatches of a step read the same weights.
    pub const fn is_synchronous(self) -> bool {
        !matches!(self, Kind::PipeDream | Kind::PipeDream2Bw)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// No schedule has this name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown pipeline schedule '{found}'; choose one of {names}", names = names())]
pub struct ParseKindError {
    /// What was given.
    pub found: String,
}

fn names() -> String {
    Kind::ALL.map(Kind::name).join(", ")
}

impl FromStr for Kind {
    type Err = ParseKindError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let kind = Kind::ALL.into_iter().find(|kind| kind.name() == text);
        kind.ok_or_else(|| ParseKindError { found: text.to_owned() })
    }
}
