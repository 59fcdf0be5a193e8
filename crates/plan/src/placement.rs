use crate::mesh::Mesh;
use serde::{Deserialize, Serialize};
use trireme_base::{DType, Rank, ReduceOp};

/// How a tensor lies along one mesh axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Placement {
    /// Every rank of the axis holds the same values.
    Replicate,
    /// The ranks hold consecutive parts of dim `dim`, in rank order; the first
    /// `size % degree` parts are one longer.
    Shard {
        /// The dim that is cut.
        dim: usize,
    },
    /// The ranks hold terms that must be reduced before the value is whole.
    Partial(ReduceOp),
}

/// What a tensor is called, how large it is as a whole, and where its parts lie.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorPlacement {
    /// Fully qualified name, such as `transformer.h.0.attn.c_attn.weight`.
    pub name: String,
    /// Shape of the whole tensor.
    pub shape: Vec<usize>,
    /// Element type.
    pub dtype: DType,
    /// One placement for each axis of the mesh.
    pub placements: Vec<Placement>,
}

/// A box within a tensor: where it begins and how far it reaches along each dim.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Extent {
    /// First index along each dim.
    pub start: Vec<usize>,
    /// Number of indices along each dim.
    pub shape: Vec<usize>,
}

impl Extent {
    /// All of a tensor of this shape.
    pub fn whole(shape: &[usize]) -> Self {
        Extent { start: vec![0; shape.len()], shape: shape.to_vec() }
    }

    /// Number of elements.
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }
}

/// A placement that does not fit its tensor or mesh.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlacementError {
    /// Not one placement for each axis.
    #[error("tensor '{name}' has {placements} placements on a mesh of {axes} axes")]
    WrongNumber {
        /// The tensor.
        name: String,
        /// Its number of placements.
        placements: usize,
        /// The mesh's number of axes.
        axes: usize,
    },
    /// A dim that the tensor lacks.
    #[error("tensor '{name}' of shape {shape:?} has no dim {dim} to shard")]
    NoSuchDim {
        /// The tensor.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
        /// The dim asked for.
        dim: usize,
    },
}

impl TensorPlacement {
    /// A tensor of which every rank of `mesh` holds all.
    pub fn replicated(name: impl Into<String>, shape: &[usize], dtype: DType, mesh: &Mesh) -> Self {
        TensorPlacement {
            name: name.into(),
            shape: shape.to_vec(),
            dtype,
            placements: vec![Placement::Replicate; mesh.axes().len()],
        }
    }

    /// The part of the tensor that `rank` holds; several ranks hold the same part where it is replicated.
    ///
    /// # Panics
    /// If `rank` is outside of the mesh.
    pub fn extent(&self, mesh: &Mesh, rank: Rank) -> Result<Extent, PlacementError> {
        if self.placements.len() != mesh.axes().len() {
            return Err(PlacementError::WrongNumber {
                name: self.name.clone(),
                placements: self.placements.len(),
                axes: mesh.axes().len(),
            });
        }
        let mut extent = Extent::whole(&self.shape);
        let positions = mesh.coordinates(rank);
        for ((placement, (_, degree)), position) in self.placements.iter().zip(mesh.axes()).zip(positions) {
            let &Placement::Shard { dim } = placement else { continue };
            if dim >= self.shape.len() {
                return Err(PlacementError::NoSuchDim {
                    name: self.name.clone(),
                    shape: self.shape.clone(),
                    dim,
                });
            }
            let (base, longer) = (extent.shape[dim] / degree, extent.shape[dim] % degree);
            extent.start[dim] += position * base + position.min(longer);
            extent.shape[dim] = base + usize::from(position < longer);
        }
        Ok(extent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::Axis;

    fn sharded(size: usize, degree: usize) -> Vec<(usize, usize)> {
        let mesh = Mesh::new(&[(Axis::DataReplicate, degree)]).unwrap();
        let tensor = TensorPlacement {
            name: "w".into(),
            shape: vec![4, size],
            dtype: DType::F32,
            placements: vec![Placement::Shard { dim: 1 }],
        };
        let part = |rank| tensor.extent(&mesh, Rank(rank)).unwrap();
        (0..degree).map(|rank| (part(rank).start[1], part(rank).shape[1])).collect()
    }

    #[test]
    fn shards_are_consecutive_and_cover_the_dim() {
        assert_eq!(sharded(6, 2), [(0, 3), (3, 3)]);
        assert_eq!(sharded(7, 3), [(0, 3), (3, 2), (5, 2)]);
        assert_eq!(sharded(1, 3), [(0, 1), (1, 0), (1, 0)]);
    }

    #[test]
    fn refuses_what_does_not_fit() {
        let mesh = Mesh::data_parallel(2);
        let mut tensor = TensorPlacement::replicated("w", &[4], DType::F32, &mesh);
        assert_eq!(tensor.extent(&mesh, Rank(1)), Ok(Extent::whole(&[4])));
        tensor.placements = vec![Placement::Shard { dim: 1 }];
        assert!(matches!(tensor.extent(&mesh, Rank(0)), Err(PlacementError::NoSuchDim { dim: 1, .. })));
        tensor.placements.clear();
        assert!(matches!(tensor.extent(&mesh, Rank(0)), Err(PlacementError::WrongNumber { .. })));
    }
}
