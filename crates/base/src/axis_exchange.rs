//! What ranks exchange within a unit.

crate::named! {
    /// Ranks that exchange something within a unit.
    pub enum UnitAxis {
        /// Those with parts of the same parameters.
        Tensor = "tensor",
        /// Those among which keys and values travel.
        Ring = "ring",
        /// Those that exchange positions for heads.
        Heads = "heads",
        /// Those with different experts.
        Expert = "expert",
    }
}

crate::named! {
    /// A kind of exchange along an axis.
    pub enum ExchangeKind {
        /// Every rank gets the sums of what all have.
        AllReduce = "all_reduce",
        /// Every rank gets the parts of all, one after the other.
        AllGather = "all_gather",
        /// Every rank gets its part of the sums of what all have.
        ReduceScatter = "reduce_scatter",
        /// Every rank gets a part of what each of the others has.
        AllToAll = "all_to_all",
        /// Every rank gets what the one before has.
        Shift = "shift",
    }
}

/// An exchange along an axis, as one rank sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AxisExchange {
    /// Among which ranks.
    pub axis: UnitAxis,
    /// What is done.
    pub kind: ExchangeKind,
    /// Bytes of the vector that ranks sum or gather, or in which each has a part for every rank; of what each sends, if they shift.
    pub num_bytes: usize,
}

/// What passes of a unit over one microbatch exchange along an axis, in order.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PassExchanges {
    /// Forward, and a recomputation of all of it.
    pub forward: Vec<AxisExchange>,
    /// Backward.
    pub backward: Vec<AxisExchange>,
    /// The input half of backward, where the halves run apart.
    pub input_half: Vec<AxisExchange>,
    /// The weight half.
    pub weight_half: Vec<AxisExchange>,
}
