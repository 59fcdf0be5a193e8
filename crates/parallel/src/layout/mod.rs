//! Which rank does what: the grid of ranks, the chain of units, and which part of each parameter a rank holds.

pub(crate) mod chain;
pub(crate) mod per_experts;
pub(crate) mod placement;
pub(crate) mod ranks;
