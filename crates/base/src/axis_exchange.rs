//! What ranks exchange within a unit.

crate::named! {
    /// A kind of exchange along an axis.
    pub enum ExchangeKind {
        /// Every rank gets the sums of what all have.
        AllReduce = "all_reduce",
        /// Every rank gets the parts of all, one after the other.
        AllGather = "all_gather",
        /// Every rank gets its part of the sums of what all have.
        ReduceScatter = "reduce_scatter",
    }
}

/// An exchange along an axis, as one rank sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AxisExchange {
    /// What is done.
    pub kind: ExchangeKind,
    /// Bytes of the whole vector, of which ranks have parts or terms.
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
