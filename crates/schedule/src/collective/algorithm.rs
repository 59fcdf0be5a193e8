use std::fmt;
use std::str::FromStr;
use trireme_base::Rank;

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

/// An algorithm that treats all ranks alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FlatAlgorithm {
    /// In memory that all ranks share; it has no steps, the transport executes it.
    Direct,
    /// Partners at doubling distances exchange all they have.
    RecursiveDoubling,
    /// Partners at doubling distances exchange what the other one keeps.
    RecursiveHalving,
    /// Vectors are halved while distances double; then the way back.
    HalvingDoubling,
    /// Each rank sends to the next one only.
    Ring,
    /// Subtrees of ranks merge, each twice as large as before.
    BinomialTree,
    /// Two trees that carry half of the vector each, chunk by chunk.
    DoubleBinaryTree,
    /// The root scatters along a binomial tree, a ring gathers.
    ScatterAllGather,
    /// Each two ranks have one exchange.
    Pairwise,
    /// By the powers of two that make up a distance, many blocks in a message.
    Bruck,
    /// The root speaks with one rank after the other.
    Linear,
    /// Empty messages at doubling distances.
    Dissemination,
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

/// Who speaks for a host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Leaders {
    /// One rank, for all of the vector.
    One,
    /// Every rank, for its block; hosts must have equally many ranks.
    All,
}

impl FlatAlgorithm {
    /// All of them, in the order in which ties are decided.
    pub const ALL: [FlatAlgorithm; 12] = [
        FlatAlgorithm::Direct,
        FlatAlgorithm::RecursiveDoubling,
        FlatAlgorithm::RecursiveHalving,
        FlatAlgorithm::HalvingDoubling,
        FlatAlgorithm::BinomialTree,
        FlatAlgorithm::DoubleBinaryTree,
        FlatAlgorithm::ScatterAllGather,
        FlatAlgorithm::Ring,
        FlatAlgorithm::Bruck,
        FlatAlgorithm::Pairwise,
        FlatAlgorithm::Linear,
        FlatAlgorithm::Dissemination,
    ];

    /// The name in text: `ring`.
    pub fn name(self) -> &'static str {
        match self {
            FlatAlgorithm::Direct => "direct",
            FlatAlgorithm::RecursiveDoubling => "recursive_doubling",
            FlatAlgorithm::RecursiveHalving => "recursive_halving",
            FlatAlgorithm::HalvingDoubling => "halving_doubling",
            FlatAlgorithm::Ring => "ring",
            FlatAlgorithm::BinomialTree => "binomial_tree",
            FlatAlgorithm::DoubleBinaryTree => "double_binary_tree",
            FlatAlgorithm::ScatterAllGather => "scatter_all_gather",
            FlatAlgorithm::Pairwise => "pairwise",
            FlatAlgorithm::Bruck => "bruck",
            FlatAlgorithm::Linear => "linear",
            FlatAlgorithm::Dissemination => "dissemination",
        }
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

impl fmt::Display for FlatAlgorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for Leaders {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Leaders::One => "one",
            Leaders::All => "all",
        })
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

/// The text names no algorithm.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ParseAlgorithmError {
    /// It is none of the names.
    #[error(
        "'{found}' is not an algorithm; choose one of {}, or hierarchical:<one|all>:<within>:<across>",
        names()
    )]
    Unknown {
        /// The text.
        found: String,
    },
    /// Two levels, not well described.
    #[error(
        "'{found}' should have the form hierarchical:<one|all>:<within>:<across>, such as hierarchical:all:direct:ring"
    )]
    Hierarchy {
        /// The text.
        found: String,
    },
}

fn names() -> String {
    FlatAlgorithm::ALL.map(FlatAlgorithm::name).join(", ")
}

impl FromStr for FlatAlgorithm {
    type Err = ParseAlgorithmError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let named = FlatAlgorithm::ALL.into_iter().find(|flat| flat.name() == text);
        named.ok_or_else(|| ParseAlgorithmError::Unknown { found: text.to_owned() })
    }
}

impl FromStr for Algorithm {
    type Err = ParseAlgorithmError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let Some(levels) = text.strip_prefix("hierarchical") else {
            return Ok(Algorithm::Flat(text.parse()?));
        };
        let malformed = || ParseAlgorithmError::Hierarchy { found: text.to_owned() };
        let mut words = levels.split(':').skip(1);
        let (Some(leaders), Some(within), Some(across), None) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            return Err(malformed());
        };
        let leaders = match leaders {
            "one" => Leaders::One,
            "all" => Leaders::All,
            _ => return Err(malformed()),
        };
        Ok(Algorithm::Hierarchical(Hierarchy { leaders, within: within.parse()?, across: across.parse()? }))
    }
}
