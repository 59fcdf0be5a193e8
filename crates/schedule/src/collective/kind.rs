//! The collectives and their data flow.

use super::block;
use std::fmt;
use trireme_base::{Rank, named};

named! {
    /// The kinds of collectives. Each rank has a vector.
    pub enum CollectiveKind {
        /// Every rank gets the reduction of all vectors.
        AllReduce = "all_reduce",
        /// The root gets the reduction of all vectors.
        Reduce = "reduce",
        /// Every rank gets the root's vector.
        Broadcast = "broadcast",
        /// Every rank gets every rank's block.
        AllGather = "all_gather",
        /// Every rank gets its block of the reduction of all vectors.
        ReduceScatter = "reduce_scatter",
        /// The root gets every rank's block.
        Gather = "gather",
        /// Every rank gets its block of the root's vector.
        Scatter = "scatter",
        /// Block `j` of rank `i` becomes block `i` of rank `j`.
        AllToAll = "all_to_all",
        /// No rank leaves before every rank has entered.
        Barrier = "barrier",
    }
}

/// The input or output of a rank in a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Data {
    /// Nothing.
    Nothing,
    /// The whole vector.
    Whole,
    /// The [block](super::block) of the rank.
    Block,
    /// One block for each rank before the operation, and one block from each rank after it.
    Blocks,
}

/// The role of the root in a collective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RootRole {
    /// The root alone has an input.
    Source,
    /// The root alone has an output.
    Target,
}

/// The inputs and outputs of a collective, and whether it reduces. Executors derive from it which rank reads which elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataFlow {
    /// The input of a rank that has one.
    pub input: Data,
    /// The output of a rank that has one.
    pub output: Data,
    /// The role of the root; `None` if all ranks have the same role.
    pub root: Option<RootRole>,
    /// Whether elements of several ranks are combined, so that an order matters.
    pub reduces: bool,
}

impl CollectiveKind {
    /// Returns the inputs and outputs of the collective.
    pub const fn data_flow(self) -> DataFlow {
        use Data::{Block, Blocks, Nothing, Whole};
        use RootRole::{Source, Target};
        let (input, output, root, reduces) = match self {
            CollectiveKind::AllReduce => (Whole, Whole, None, true),
            CollectiveKind::Reduce => (Whole, Whole, Some(Target), true),
            CollectiveKind::Broadcast => (Whole, Whole, Some(Source), false),
            CollectiveKind::AllGather => (Block, Whole, None, false),
            CollectiveKind::ReduceScatter => (Whole, Block, None, true),
            CollectiveKind::Gather => (Block, Whole, Some(Target), false),
            CollectiveKind::Scatter => (Whole, Block, Some(Source), false),
            CollectiveKind::AllToAll => (Blocks, Blocks, None, false),
            CollectiveKind::Barrier => (Nothing, Nothing, None, false),
        };
        DataFlow { input, output, root, reduces }
    }

    /// Returns the collective on vectors of `len` elements, without a root.
    ///
    /// # Panics
    /// If the kind has a root.
    pub const fn with_len(self, len: usize) -> Collective {
        assert!(self.data_flow().root.is_none(), "the collective has a root");
        Collective { kind: self, root: None, len }
    }

    /// Returns the collective on vectors of `len` elements. Kinds without a root ignore `root`.
    pub const fn with_root(self, root: Rank, len: usize) -> Collective {
        let root = if self.data_flow().root.is_some() { Some(root) } else { None };
        Collective { kind: self, root, len }
    }
}

/// A collective on vectors of `len` elements, one on each rank.
///
/// Collectives work in place. [`block`](super::block) is a rank's share, before (all-gather, gather) or after (reduce-scatter,
/// scatter) the operation. Other elements are unspecified after a reduce, reduce-scatter, gather or scatter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Collective {
    /// The kind.
    pub kind: CollectiveKind,
    root: Option<Rank>,
    /// Elements of the vector, or of all blocks; a multiple of the world size for an all-to-all, 0 for a barrier.
    pub len: usize,
}

impl Collective {
    /// Returns the root, if the kind has one.
    pub const fn root(self) -> Option<Rank> {
        self.root
    }

    /// Returns the collective with its root mapped by `map`, if it has a root.
    pub(super) fn map_root(self, map: impl Fn(Rank) -> Rank) -> Self {
        Collective { root: self.root.map(map), ..self }
    }

    /// Returns whether `rank` has an input.
    pub fn has_input(self, rank: Rank) -> bool {
        let flow = self.kind.data_flow();
        flow.input != Data::Nothing && (flow.root != Some(RootRole::Source) || self.root == Some(rank))
    }

    /// Returns whether `rank` has an output.
    pub fn has_output(self, rank: Rank) -> bool {
        let flow = self.kind.data_flow();
        flow.output != Data::Nothing && (flow.root != Some(RootRole::Target) || self.root == Some(rank))
    }

    /// Returns the number of elements of the input and of the output of `rank`, if they are separate vectors (an out-of-place operation).
    pub fn lens(self, rank: Rank, world_size: usize) -> [usize; 2] {
        let flow = self.kind.data_flow();
        let len_of = |data, has_any| match data {
            Data::Whole | Data::Blocks if has_any => self.len,
            Data::Block if has_any => block(rank, world_size, self.len).len(),
            _ => 0,
        };
        [len_of(flow.input, self.has_input(rank)), len_of(flow.output, self.has_output(rank))]
    }

    /// Returns whether elements of several ranks are combined, so that an order matters.
    pub fn reduces(self) -> bool {
        self.kind.data_flow().reduces
    }
}

/// Writes the operation's name, such as `all_reduce`.
impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kind.fmt(f)
    }
}
