//! Communication between ranks within the forward or backward pass of one unit.

crate::named! {
    /// The axis along which ranks communicate within a unit.
    pub enum UnitAxis {
        /// Tensor parallelism: the ranks hold parts of the same parameters.
        Tensor = "tensor",
        /// Ring attention: keys and values move around the ring of ranks.
        Ring = "ring",
        /// Ulysses attention: an all-to-all trades positions of the sequence for attention heads.
        Heads = "heads",
        /// Expert parallelism: the ranks hold different experts.
        Expert = "expert",
    }
}

crate::named! {
    /// The communication pattern of an exchange along an axis.
    pub enum ExchangeKind {
        /// Every rank receives the sum of the vectors of all ranks.
        AllReduce = "all_reduce",
        /// Every rank receives the parts of all ranks, concatenated in rank order.
        AllGather = "all_gather",
        /// Every rank receives its own part of the sum of the vectors of all ranks.
        ReduceScatter = "reduce_scatter",
        /// Every rank sends a different part of its vector to each rank.
        AllToAll = "all_to_all",
        /// Every rank sends its vector to the next rank of the axis and receives the vector of the previous rank.
        Shift = "shift",
    }
}

/// An exchange along an axis, seen from one rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AxisExchange {
    /// The axis along which the ranks communicate.
    pub axis: UnitAxis,
    /// The communication pattern.
    pub kind: ExchangeKind,
    /// Size in bytes. For a reduction or a gather: the full vector. For an all-to-all: the vector that holds a part for every rank. For a
    /// shift: the vector that each rank sends.
    pub num_bytes: usize,
}

/// The exchanges of one unit's passes over one microbatch, in the order of issue.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PassExchanges {
    /// Exchanges of forward, which a full recomputation of forward repeats.
    pub forward: Vec<AxisExchange>,
    /// Exchanges of backward, if backward runs as a whole.
    pub backward: Vec<AxisExchange>,
    /// Exchanges of the half of backward that computes gradients of the inputs, if the halves run separately.
    pub input_half: Vec<AxisExchange>,
    /// Exchanges of the half of backward that computes gradients of the weights, if the halves run separately.
    pub weight_half: Vec<AxisExchange>,
}
