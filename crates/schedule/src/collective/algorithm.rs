use crate::parse::ParseError;
use std::fmt;
use std::str::FromStr;
use trireme_base::named;

/// The algorithm of a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// One algorithm among all ranks, regardless of their hosts.
    Flat(FlatAlgorithm),
    /// Two levels: within hosts and across hosts.
    Hierarchical(Hierarchy),
}

named! {
    /// An algorithm that treats all ranks alike. The variants are in the order in which ties between predicted times are decided.
    pub enum FlatAlgorithm {
        /// Works in memory that all ranks share. It has no steps; the transport executes it.
        Direct = "direct",
        /// Partners at doubling distances exchange all elements that they have.
        RecursiveDoubling = "recursive_doubling",
        /// Partners at doubling distances exchange elements: each sends the elements that the other keeps.
        RecursiveHalving = "recursive_halving",
        /// Vectors are halved while distances double; then the same exchanges run in reverse.
        HalvingDoubling = "halving_doubling",
        /// Subtrees of ranks merge, each twice as large as before.
        BinomialTree = "binomial_tree",
        /// Two trees, each of which carries half of the vector chunk by chunk.
        DoubleBinaryTree = "double_binary_tree",
        /// The root scatters blocks along a binomial tree, and a ring gathers them.
        ScatterAllGather = "scatter_all_gather",
        /// Each rank sends only to the next rank.
        Ring = "ring",
        /// A block is forwarded over hops whose lengths are the powers of two that add up to the distance between its sender and its
        /// receiver. Each message holds all blocks with the same hop.
        Bruck = "bruck",
        /// Each pair of ranks exchanges blocks directly.
        Pairwise = "pairwise",
        /// The root communicates with one rank after the other.
        Linear = "linear",
        /// Empty messages at doubling distances.
        Dissemination = "dissemination",
    }
}

/// An algorithm of two levels: phases within each host, then across hosts, then within hosts again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Hierarchy {
    /// The ranks that communicate across hosts.
    pub leaders: Leaders,
    /// The algorithm among the ranks of a host.
    pub within: FlatAlgorithm,
    /// The algorithm among leaders of different hosts.
    pub across: FlatAlgorithm,
}

named! {
    /// The ranks that communicate across hosts.
    pub enum Leaders {
        /// One rank per host, for the full vector.
        One = "one",
        /// Every rank, for its block. Hosts must have equally many ranks.
        All = "all",
    }
}

impl Algorithm {
    /// Returns whether the algorithm or one of its phases is [direct](FlatAlgorithm::Direct).
    pub fn needs_shared_memory(self) -> bool {
        match self {
            Algorithm::Flat(flat) => flat == FlatAlgorithm::Direct,
            Algorithm::Hierarchical(levels) => levels.within == FlatAlgorithm::Direct,
        }
    }
}

impl From<FlatAlgorithm> for Algorithm {
    fn from(flat: FlatAlgorithm) -> Self {
        Algorithm::Flat(flat)
    }
}

/// Writes `ring`, or `hierarchical:all:direct:ring`: leaders, algorithm within hosts, algorithm across hosts.
impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Algorithm::Flat(flat) => flat.fmt(f),
            Algorithm::Hierarchical(Hierarchy { leaders, within, across }) => {
                write!(f, "hierarchical:{leaders}:{within}:{across}")
            }
        }
    }
}

impl FromStr for Algorithm {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let flat = |text: &str| {
            FlatAlgorithm::named(text).ok_or_else(|| {
                let names = FlatAlgorithm::ALL.map(FlatAlgorithm::name).join(", ");
                ParseError(format!(
                    "'{text}' is not an algorithm; choose one of {names}, or hierarchical:<one|all>:<within>:<across>"
                ))
            })
        };
        let Some(levels) = text.strip_prefix("hierarchical") else { return flat(text).map(Algorithm::Flat) };
        let levels: Vec<&str> = levels.split(':').skip(1).collect();
        let leaders = levels.first().and_then(|name| Leaders::named(name));
        let (Some(leaders), [_, within, across]) = (leaders, &levels[..]) else {
            return Err(ParseError(format!(
                "'{text}' should have the form hierarchical:<one|all>:<within>:<across>, such as hierarchical:all:direct:ring"
            )));
        };
        Ok(Algorithm::Hierarchical(Hierarchy { leaders, within: flat(within)?, across: flat(across)? }))
    }
}
