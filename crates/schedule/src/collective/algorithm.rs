use crate::parse::ParseError;
use std::fmt;
use std::str::FromStr;
use trireme_base::named;

/// How a collective is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// All ranks alike, wherever they are.
    Flat(FlatAlgorithm),
    /// Within hosts and across them.
    Hierarchical(Hierarchy),
}

named! {
    /// An algorithm that treats all ranks alike, in the order in which ties are decided.
    pub enum FlatAlgorithm {
        /// In memory that all ranks share; it has no steps, the transport executes it.
        Direct = "direct",
        /// Partners at doubling distances exchange all they have.
        RecursiveDoubling = "recursive_doubling",
        /// Partners at doubling distances exchange what the other one keeps.
        RecursiveHalving = "recursive_halving",
        /// Vectors are halved while distances double; then the way back.
        HalvingDoubling = "halving_doubling",
        /// Subtrees of ranks merge, each twice as large as before.
        BinomialTree = "binomial_tree",
        /// Two trees that carry half of the vector each, chunk by chunk.
        DoubleBinaryTree = "double_binary_tree",
        /// The root scatters along a binomial tree, a ring gathers.
        ScatterAllGather = "scatter_all_gather",
        /// Each rank sends to the next one only.
        Ring = "ring",
        /// By the powers of two that make up a distance, many blocks in a message.
        Bruck = "bruck",
        /// Each two ranks have one exchange.
        Pairwise = "pairwise",
        /// The root speaks with one rank after the other.
        Linear = "linear",
        /// Empty messages at doubling distances.
        Dissemination = "dissemination",
    }
}

/// An algorithm of two levels: first among the ranks of each host, then across hosts, then within hosts again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Hierarchy {
    /// Who speaks for a host.
    pub leaders: Leaders,
    /// Among the ranks of a host.
    pub within: FlatAlgorithm,
    /// Among leaders of different hosts.
    pub across: FlatAlgorithm,
}

named! {
    /// Who speaks for a host.
    pub enum Leaders {
        /// One rank, for all of the vector.
        One = "one",
        /// Every rank, for its block; hosts must have equally many ranks.
        All = "all",
    }
}

impl Algorithm {
    /// Whether it is, or has phases that are, [direct](FlatAlgorithm::Direct).
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

/// Writes `ring`, or `hierarchical:all:direct:ring`: who speaks for a host, the algorithm within, the one across.
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
