//! Documents that describe a mesh of ranks and the placement of every tensor on it.
//!
//! This is the one description that parallelism, checkpoints and planning read; nothing else knows how
//! a tensor is cut. Pure data and checks: no IO, no threads, no clock.

mod mesh;
mod placement;
mod run;

pub use mesh::{Axis, Mesh, MeshError};
pub use placement::{Extent, HeldBox, Part, Placement, PlacementError, TensorPlacement};
pub use run::{Run, position_in, runs};
