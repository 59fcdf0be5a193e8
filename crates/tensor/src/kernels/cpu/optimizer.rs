//! Optimizer updates: one pass over parameters, gradients and states, in pieces.

mod factored;
mod orthogonalize;
mod pieces;
pub mod rules;
mod scales;
mod state;

pub(crate) use factored::MomentFactors;
pub use factored::{FactoredMatrix, FactoredMoments, FactoredStep};
pub(crate) use orthogonalize::{NORM_EPSILON, NewtonSchulzMatmuls, OrthogonalizeScratch, QUINTIC};
pub(crate) use pieces::PieceUpdates;
pub use pieces::{Piece, Pieces};
pub(crate) use rules::{ElementAccess, Update};
pub use scales::{LeafRun, StepScale};
pub use state::StateDType;
pub(crate) use state::StateSlice;

#[cfg(test)]
mod tests;
