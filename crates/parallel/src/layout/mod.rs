//! The layout of a model on ranks: the grid of ranks, the chain of units, and the part of each parameter that a rank holds.

mod chain;
mod dense_and_expert;
mod placement;
mod ranks;

pub use chain::chain;
pub(crate) use dense_and_expert::DenseAndExpert;
pub use placement::Placements;
pub use ranks::{Degrees, RankGrid};
pub(crate) use ranks::{HostLevels, StateRanks};
