use serde::{Deserialize, Serialize};
use std::fmt;
use trireme_base::Rank;

/// A direction of parallelism.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Axis {
    /// Ranks that hold different units of the model, and see the same microbatches.
    Pipeline,
    /// Ranks that hold the same parameters and see different microbatches.
    DataReplicate,
    /// Ranks that shard the training state, or a part of it, and see different microbatches.
    DataShard,
}

impl fmt::Display for Axis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Axis::Pipeline => "pipeline",
            Axis::DataReplicate => "data_replicate",
            Axis::DataShard => "data_shard",
        })
    }
}

/// The ranks of a job as a grid: each axis with its degree, the first varying slowest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mesh {
    axes: Vec<(Axis, usize)>,
}

/// A mesh that cannot be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MeshError {
    /// A degree of zero.
    #[error("the degree of axis {axis} is 0; it must be at least 1")]
    ZeroDegree {
        /// The axis.
        axis: Axis,
    },
    /// The same axis twice.
    #[error("axis {axis} occurs twice")]
    RepeatedAxis {
        /// The axis.
        axis: Axis,
    },
}

impl Mesh {
    /// A mesh of the given axes, the first varying slowest.
    pub fn new(axes: &[(Axis, usize)]) -> Result<Self, MeshError> {
        for (index, &(axis, degree)) in axes.iter().enumerate() {
            if degree == 0 {
                return Err(MeshError::ZeroDegree { axis });
            }
            if axes[..index].iter().any(|(earlier, _)| *earlier == axis) {
                return Err(MeshError::RepeatedAxis { axis });
            }
        }
        Ok(Mesh { axes: axes.to_vec() })
    }

    /// Pure data parallelism: `degree` replicas.
    ///
    /// # Panics
    /// If `degree` is 0.
    pub fn data_parallel(degree: usize) -> Self {
        Mesh::new(&[(Axis::DataReplicate, degree)]).expect("one axis of at least one rank is a mesh")
    }

    /// The axes with their degrees, the first varying slowest.
    pub fn axes(&self) -> &[(Axis, usize)] {
        &self.axes
    }

    /// Number of ranks: the product of the degrees.
    pub fn num_ranks(&self) -> usize {
        self.axes.iter().map(|(_, degree)| degree).product()
    }

    /// The position of `rank` along each axis.
    ///
    /// # Panics
    /// If `rank` is outside of the mesh.
    pub fn coordinates(&self, rank: Rank) -> Vec<usize> {
        assert!(rank.0 < self.num_ranks(), "rank {rank} is outside of a mesh of {}", self.num_ranks());
        let mut rest = rank.0;
        let mut coordinates = vec![0; self.axes.len()];
        for (slot, (_, degree)) in coordinates.iter_mut().zip(&self.axes).rev() {
            *slot = rest % degree;
            rest /= degree;
        }
        coordinates
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coordinates_count_the_last_axis_fastest() {
        let mesh = Mesh { axes: vec![(Axis::DataReplicate, 2), (Axis::DataReplicate, 3)] };
        assert_eq!(mesh.num_ranks(), 6);
        assert_eq!(mesh.coordinates(Rank(0)), [0, 0]);
        assert_eq!(mesh.coordinates(Rank(2)), [0, 2]);
        assert_eq!(mesh.coordinates(Rank(5)), [1, 2]);
    }

    #[test]
    fn refuses_degenerate_meshes() {
        let axis = Axis::DataReplicate;
        assert_eq!(Mesh::new(&[(axis, 0)]), Err(MeshError::ZeroDegree { axis }));
        assert_eq!(Mesh::new(&[(axis, 1), (axis, 1)]), Err(MeshError::RepeatedAxis { axis }));
    }
}
