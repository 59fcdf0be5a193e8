//! Documents that describe a mesh of ranks and the placement of every tensor on it.
//!
//! The one description of how tensors are cut, for parallelism, checkpoints and planning. Pure data: no IO, threads or clock.

mod mesh;
mod placement;
mod run;

pub use mesh::{Axis, Mesh, MeshError};
pub use placement::{Extent, HeldBox, Part, Placement, PlacementError, TensorPlacement};
pub use run::{Run, position_in, runs};
