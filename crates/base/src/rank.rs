use std::fmt;

/// The number of a worker in a world or a group: `0 <= rank < world_size`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Rank(pub usize);

impl Rank {
    /// The rank that does the work that only one rank may do, such as rendezvous, console output and manifests.
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
        /// Addition. Integers wrap.
        Sum = "sum",
        /// The sum divided by the number of ranks. The division is done once, after the complete sum. Integers round toward zero.
        Mean = "mean",
        /// Multiplication. Integers wrap.
        Prod = "prod",
        /// The larger of the two. NaN takes precedence, so that an invalid value is not hidden.
        Max = "max",
        /// The smaller of the two. NaN takes precedence.
        Min = "min",
    }
}
