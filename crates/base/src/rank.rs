use std::fmt;

/// One worker of a world or of a group: `0 <= rank < world_size`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank(pub usize);

impl Rank {
    /// The rank that does what only one rank may do: rendezvous, console output, manifests.
    pub const ROOT: Rank = Rank(0);
}

impl From<Rank> for usize {
    fn from(rank: Rank) -> usize {
        rank.0
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

crate::named! {
    /// The function that combines two elements of a reduction.
    pub enum ReduceOp {
        /// Addition; integers wrap.
        Sum = "sum",
        /// The sum divided by the number of ranks: once, after the whole sum. Integers round toward zero.
        Mean = "mean",
        /// Multiplication; integers wrap.
        Prod = "prod",
        /// The larger of the two; NaN wins, so that a broken value is not hidden.
        Max = "max",
        /// The smaller of the two; NaN wins.
        Min = "min",
    }
}
