//! The mesh of ranks, and the placement of every tensor on it.
//!
//! Parallelism, checkpoints and planning all use this description of how tensors are split. The crate is pure data: no IO, threads or
//! clock.

mod copy_run;
mod mesh;
mod placement;

pub use copy_run::{CopyRun, copy_runs, row_major_index};
pub use mesh::{Axis, Mesh, MeshError};
pub use placement::{Extent, LocalBox, LocalShape, Placement, PlacementError, TensorPlacement};
