//! The mesh of ranks, and the placement of every tensor on it.
//!
//! This is the only description of how tensors are split. Parallelism, checkpoints and planning use it. The crate is pure data: no IO,
//! threads or clock.

mod mesh;
mod placement;
mod run;

pub use mesh::{Axis, Mesh, MeshError};
pub use placement::{Extent, LocalBox, LocalShape, Placement, PlacementError, TensorPlacement};
pub use run::{Run, position_in, runs};
