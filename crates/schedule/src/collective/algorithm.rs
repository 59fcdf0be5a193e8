use crate::parse::ParseError;
use std::fmt;
use std::str::FromStr;
use trireme_base::{Rank, named};

/// What a group does together, on a vector of `len` elements on every rank.
///
/// All work in place. [`block`](super::block) says where the
/// share of a rank lies, before (all-gather, gather) or after (reduce-scatter, scatter) the operation. What else a
/// vector holds after a reduce, reduce-scatter, gather or scatter is unspecified.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Collective {
    /// Every rank gets the reduction of all vectors.
    AllReduce {
        /// Elements of the vector.
        len: usize,
    },
    /// The root gets the reduction of all vectors.
    Reduce {
        /// Who gets it.
        root: Rank,
        /// Elements of the vector.
        len: usize,
    },
    /// Every rank gets the root's vector.
    Broadcast {
        /// Whose.
        root: Rank,
        /// Elements of the vector.
        len: usize,
    },
    /// Every rank gets every rank's block.
    AllGather {
        /// Elements of all blocks.
        len: usize,
    },
    /// Every rank gets its block of the reduction of all vectors.
    ReduceScatter {
        /// Elements of all blocks.
        len: usize,
    },
    /// The root gets every rank's block.
    Gather {
        /// Who gets them.
        root: Rank,
        /// Elements of all blocks.
        len: usize,
    },
    /// Every rank gets its block of the root's vector.
    Scatter {
        /// Whose.
        root: Rank,
        /// Elements of all blocks.
        len: usize,
    },
    /// Block `j` of rank `i` becomes block `i` of rank `j`.
    AllToAll {
        /// Elements of all blocks; a multiple of the world size.
        len: usize,
    },
    /// Nobody is done before everybody has begun.
    Barrier,
}

impl Collective {
    /// Elements of the vector.
    pub fn len(self) -> usize {
        match self {
            Collective::AllReduce { len }
            | Collective::Reduce { len, .. }
            | Collective::Broadcast { len, .. }
            | Collective::AllGather { len }
            | Collective::ReduceScatter { len }
            | Collective::Gather { len, .. }
            | Collective::Scatter { len, .. }
            | Collective::AllToAll { len } => len,
            Collective::Barrier => 0,
        }
    }

    /// The rank that gives or gets, where one does.
    pub fn root(self) -> Option<Rank> {
        match self {
            Collective::Reduce { root, .. }
            | Collective::Broadcast { root, .. }
            | Collective::Gather { root, .. }
            | Collective::Scatter { root, .. } => Some(root),
            _ => None,
        }
    }

    /// The same with `map` of its root, if it has one.
    pub(super) fn with_root(mut self, map: impl Fn(Rank) -> Rank) -> Self {
        if let Collective::Reduce { root, .. }
        | Collective::Broadcast { root, .. }
        | Collective::Gather { root, .. }
        | Collective::Scatter { root, .. } = &mut self
        {
            *root = map(*root);
        }
        self
    }

    /// Whether no element is moved.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// Whether elements of several ranks are combined, so that an order matters.
    pub fn reduces(self) -> bool {
        matches!(
            self,
            Collective::AllReduce { .. } | Collective::Reduce { .. } | Collective::ReduceScatter { .. }
        )
    }
}

/// Writes the operation's name, `all_reduce`.
impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Collective::AllReduce { .. } => "all_reduce",
            Collective::Reduce { .. } => "reduce",
            Collective::Broadcast { .. } => "broadcast",
            Collective::AllGather { .. } => "all_gather",
            Collective::ReduceScatter { .. } => "reduce_scatter",
            Collective::Gather { .. } => "gather",
            Collective::Scatter { .. } => "scatter",
            Collective::AllToAll { .. } => "all_to_all",
            Collective::Barrier => "barrier",
        })
    }
}

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
