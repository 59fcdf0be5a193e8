use crate::mesh::Mesh;
use serde::{Deserialize, Serialize};
use std::ops::Range;
use trireme_base::{DType, Rank};

/// How a tensor lies along one mesh axis.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Placement {
    /// Every rank of the axis holds the same values.
    Replicate,
    /// The ranks hold consecutive parts of dim `dim`, in rank order; the first
    /// `size % degree` parts are one longer.
    Shard {
        /// The dim that is cut.
        dim: usize,
    },
    /// The ranks hold consecutive runs of the elements in row-major order: rank `i` of the axis those from `bounds[i]` to
    /// `bounds[i + 1]` of what the axes before leave it. So a buffer of several tensors is cut wherever its shards end.
    Ragged {
        /// One more than there are ranks, rising, from 0 to the number of elements.
        bounds: Vec<usize>,
    },
    /// One rank of the axis holds what the axes before leave it, and the others nothing: a unit of a pipeline.
    Single {
        /// The rank, among those of the axis.
        rank: usize,
    },
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

    /// Which elements of a tensor of this shape lie in the box, in row-major order; `None` if others lie between them.
    pub fn as_run(&self, shape: &[usize]) -> Option<Range<usize>> {
        let index = |at: &dyn Fn(usize) -> usize| {
            shape.iter().enumerate().fold(0, |index, (dim, size)| index * size + at(dim))
        };
        let first = index(&|dim| self.start[dim]);
        let is_run = self.num_elements() == 0
            || index(&|dim| self.start[dim] + self.shape[dim] - 1) + 1 - first == self.num_elements();
        is_run.then(|| first..first + self.num_elements())
    }

    /// The boxes that the elements `range`, counted in row-major order within this one, make up; in that order, and as few
    /// as possible: at most two less one for each dim.
    ///
    /// # Panics
    /// If there are not so many elements.
    pub fn run(&self, range: Range<usize>) -> Vec<Extent> {
        assert!(range.end <= self.num_elements(), "{range:?} of {} elements", self.num_elements());
        let mut boxes = Vec::new();
        if !range.is_empty() {
            self.add_run(0, range, &mut boxes);
        }
        boxes
    }

    /// As [`run`](Extent::run), for a box whose dims before `dim` have one index each.
    fn add_run(&self, dim: usize, Range { start, end }: Range<usize>, boxes: &mut Vec<Extent>) {
        if start == 0 && end == self.num_elements() {
            return boxes.push(self.clone());
        }
        let row_len: usize = self.shape[dim + 1..].iter().product();
        let rows = |first: usize, num: usize| {
            let mut rows = self.clone();
            rows.start[dim] += first;
            rows.shape[dim] = num;
            rows
        };
        let (first, last) = (start / row_len, (end - 1) / row_len);
        let (from, to) = (start - first * row_len, end - last * row_len);
        if first == last {
            return rows(first, 1).add_run(dim + 1, from..to, boxes);
        }
        let first_whole = first + usize::from(from > 0);
        let end_whole = last + usize::from(to == row_len);
        if from > 0 {
            rows(first, 1).add_run(dim + 1, from..row_len, boxes);
        }
        if first_whole < end_whole {
            boxes.push(rows(first_whole, end_whole - first_whole));
        }
        if to < row_len {
            rows(last, 1).add_run(dim + 1, 0..to, boxes);
        }
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
    /// Bounds that are none of the tensor's.
    #[error(
        "tensor '{name}' is cut at {bounds:?} into {degree} runs, which does not fit its {num_elements} elements"
    )]
    WrongBounds {
        /// The tensor.
        name: String,
        /// The bounds.
        bounds: Vec<usize>,
        /// Ranks of the axis.
        degree: usize,
        /// Elements that are cut.
        num_elements: usize,
    },
    /// A rank that the axis lacks.
    #[error("tensor '{name}' is placed on rank {rank} of an axis of {degree}")]
    NoSuchRank {
        /// The tensor.
        name: String,
        /// The rank asked for.
        rank: usize,
        /// Ranks of the axis.
        degree: usize,
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

    /// The parts of the tensor that `rank` holds, in row-major order; several ranks hold the same ones where it is
    /// replicated. One box, unless it is cut into ragged runs: then none or several.
    ///
    /// # Panics
    /// If `rank` is outside of the mesh.
    pub fn extents(&self, mesh: &Mesh, rank: Rank) -> Result<Vec<Extent>, PlacementError> {
        if self.placements.len() != mesh.axes().len() {
            return Err(PlacementError::WrongNumber {
                name: self.name.clone(),
                placements: self.placements.len(),
                axes: mesh.axes().len(),
            });
        }
        let mut extents = vec![Extent::whole(&self.shape)];
        let positions = mesh.coordinates(rank);
        for ((placement, &(_, degree)), position) in self.placements.iter().zip(mesh.axes()).zip(positions) {
            match placement {
                Placement::Replicate => (),
                Placement::Shard { dim } => {
                    let cut = |extent: &mut Extent| self.shard(extent, *dim, degree, position);
                    extents.iter_mut().try_for_each(cut)?;
                }
                Placement::Single { rank } if *rank >= degree => {
                    return Err(PlacementError::NoSuchRank { name: self.name.clone(), rank: *rank, degree });
                }
                Placement::Single { rank } if *rank != position => return Ok(Vec::new()),
                Placement::Single { .. } => (),
                Placement::Ragged { bounds } => extents = self.ragged(&extents, bounds, degree, position)?,
            }
        }
        Ok(extents)
    }

    fn shard(
        &self,
        extent: &mut Extent,
        dim: usize,
        degree: usize,
        position: usize,
    ) -> Result<(), PlacementError> {
        if dim >= self.shape.len() {
            let (name, shape) = (self.name.clone(), self.shape.clone());
            return Err(PlacementError::NoSuchDim { name, shape, dim });
        }
        let (base, longer) = (extent.shape[dim] / degree, extent.shape[dim] % degree);
        extent.start[dim] += position * base + position.min(longer);
        extent.shape[dim] = base + usize::from(position < longer);
        Ok(())
    }

    fn ragged(
        &self,
        extents: &[Extent],
        bounds: &[usize],
        degree: usize,
        position: usize,
    ) -> Result<Vec<Extent>, PlacementError> {
        let num_elements = extents.iter().map(Extent::num_elements).sum();
        let is_cut = bounds.len() == degree + 1
            && bounds.is_sorted()
            && (bounds[0], bounds[degree]) == (0, num_elements);
        if !is_cut {
            let (name, bounds) = (self.name.clone(), bounds.to_vec());
            return Err(PlacementError::WrongBounds { name, bounds, degree, num_elements });
        }
        let (start, end) = (bounds[position], bounds[position + 1]);
        let mut runs = Vec::new();
        let mut first = 0;
        for extent in extents {
            let len = extent.num_elements();
            let within = start.clamp(first, first + len) - first..end.clamp(first, first + len) - first;
            runs.extend(extent.run(within));
            first += len;
        }
        Ok(runs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::Axis;
    use proptest::prelude::*;

    fn sharded(size: usize, degree: usize) -> Vec<(usize, usize)> {
        let mesh = Mesh::new(&[(Axis::DATA_REPLICATE, degree)]).unwrap();
        let tensor = TensorPlacement {
            name: "w".into(),
            shape: vec![4, size],
            dtype: DType::F32,
            placements: vec![Placement::Shard { dim: 1 }],
        };
        let part = |rank| tensor.extents(&mesh, Rank(rank)).unwrap().remove(0);
        (0..degree).map(|rank| (part(rank).start[1], part(rank).shape[1])).collect()
    }

    #[test]
    fn shards_are_consecutive_and_cover_the_dim() {
        assert_eq!(sharded(6, 2), [(0, 3), (3, 3)]);
        assert_eq!(sharded(7, 3), [(0, 3), (3, 2), (5, 2)]);
        assert_eq!(sharded(1, 3), [(0, 1), (1, 0), (1, 0)]);
    }

    #[test]
    fn what_lies_with_one_rank_is_cut_among_the_ranks_beside_it() {
        let mesh = Mesh::new(&[(Axis::PIPELINE, 2), (Axis::DATA_SHARD, 2)]).unwrap();
        let tensor = |rank| TensorPlacement {
            name: "w".into(),
            shape: vec![4],
            dtype: DType::F32,
            placements: vec![Placement::Single { rank }, Placement::Ragged { bounds: vec![0, 1, 4] }],
        };
        let part = |start: usize, len: usize| Extent { start: vec![start], shape: vec![len] };
        let extents: Vec<_> = (0..4).map(|rank| tensor(1).extents(&mesh, Rank(rank)).unwrap()).collect();
        assert_eq!(extents, [vec![], vec![], vec![part(0, 1)], vec![part(1, 3)]]);
        let refused = tensor(2).extents(&mesh, Rank(0)).unwrap_err();
        assert_eq!(refused.to_string(), "tensor 'w' is placed on rank 2 of an axis of 2");
    }

    #[test]
    fn a_run_is_a_box_of_rows_between_parts_of_rows() {
        let whole = Extent { start: vec![1, 0, 2], shape: vec![3, 2, 4] };
        let boxes = |range: Range<usize>| -> Vec<(Vec<usize>, Vec<usize>)> {
            whole.run(range).into_iter().map(|part| (part.start, part.shape)).collect()
        };
        assert_eq!(boxes(0..24), [(vec![1, 0, 2], vec![3, 2, 4])]);
        assert_eq!(boxes(8..24), [(vec![2, 0, 2], vec![2, 2, 4])]);
        assert_eq!(boxes(9..11), [(vec![2, 0, 3], vec![1, 1, 2])]);
        assert_eq!(boxes(5..5), []);
        let run = |start: [usize; 2], shape: [usize; 2]| {
            Extent { start: start.to_vec(), shape: shape.to_vec() }.as_run(&[4, 5])
        };
        assert_eq!([run([1, 0], [2, 5]), run([3, 2], [1, 3])], [Some(5..15), Some(17..20)]);
        assert_eq!([run([0, 1], [2, 4]), run([2, 5], [1, 0])], [None, Some(15..15)]);
        let several = [
            (vec![1, 0, 5], vec![1, 1, 1]),
            (vec![1, 1, 2], vec![1, 1, 4]),
            (vec![2, 0, 2], vec![1, 2, 4]),
            (vec![3, 0, 2], vec![1, 1, 2]),
        ];
        assert_eq!(boxes(3..18), several);
        assert_eq!(Extent::whole(&[]).run(0..1), [Extent::whole(&[])]);
    }

    proptest! {
        #[test]
        fn ragged_runs_cover_the_tensor_once_and_in_order(
            shape in proptest::collection::vec(1_usize..5, 0..4), cuts in proptest::collection::vec(any::<proptest::sample::Index>(), 0..5)
        ) {
            let num_elements: usize = shape.iter().product();
            let mut bounds: Vec<usize> = cuts.iter().map(|cut| cut.index(num_elements + 1)).chain([0, num_elements]).collect();
            bounds.sort_unstable();
            let degree = bounds.len() - 1;
            let mesh = Mesh::new(&[(Axis::DATA_REPLICATE, 2), (Axis::DATA_SHARD, degree)]).unwrap();
            let placements = vec![Placement::Replicate, Placement::Ragged { bounds }];
            let tensor = TensorPlacement { name: "w".into(), shape: shape.clone(), dtype: DType::F32, placements };
            let mut found = Vec::new();
            for rank in degree..2 * degree {
                for part in tensor.extents(&mesh, Rank(rank)).unwrap() {
                    // Row-major positions of the part's elements.
                    for index in 0..part.num_elements() {
                        let (mut rest, mut position, mut stride) = (index, 0, 1);
                        for dim in (0..shape.len()).rev() {
                            position += (part.start[dim] + rest % part.shape[dim]) * stride;
                            rest /= part.shape[dim];
                            stride *= shape[dim];
                        }
                        found.push(position);
                    }
                }
            }
            prop_assert_eq!(found, (0..num_elements).collect::<Vec<_>>());
        }
    }

    #[test]
    fn refuses_what_does_not_fit() {
        let mesh = Mesh::data_parallel(2);
        let mut tensor = TensorPlacement::replicated("w", &[4], DType::F32, &mesh);
        assert_eq!(tensor.extents(&mesh, Rank(1)), Ok(vec![Extent::whole(&[4])]));
        tensor.placements = vec![Placement::Shard { dim: 1 }];
        assert!(matches!(tensor.extents(&mesh, Rank(0)), Err(PlacementError::NoSuchDim { dim: 1, .. })));
        for bounds in [vec![], vec![0, 4], vec![0, 2, 3], vec![1, 2, 4], vec![0, 5, 4]] {
            tensor.placements = vec![Placement::Ragged { bounds }];
            assert!(matches!(tensor.extents(&mesh, Rank(0)), Err(PlacementError::WrongBounds { .. })));
        }
        tensor.placements.clear();
        assert!(matches!(tensor.extents(&mesh, Rank(0)), Err(PlacementError::WrongNumber { .. })));
    }
}
