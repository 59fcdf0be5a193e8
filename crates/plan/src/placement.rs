use crate::copy_run::copy_runs;
use crate::mesh::Mesh;
use serde::{Deserialize, Serialize};
use std::ops::Range;
use trireme_base::{AxisRank, AxisSplit, DType, Rank, Segment};

/// The placement of a tensor along one mesh axis. The placements apply in the order of the mesh axes: each placement splits the part that
/// results from the previous placements. [`Ragged`](Placement::Ragged) applies last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Placement {
    /// Every rank of the axis holds the same values.
    Replicate,
    /// Each rank holds a consecutive part of dim `dim`, in rank order. The first `size % degree` parts are longer by one.
    Shard {
        /// Index of the dim that is sharded.
        dim: usize,
    },
    /// Each rank holds a part of a dim as [`AxisSplit`] describes (tensor parallelism).
    Split(AxisSplit),
    /// Each rank holds a range of the elements in row-major order. Rank `i` of the axis holds the elements from `bounds[i]` to
    /// `bounds[i + 1]`.
    ///
    /// The placements along all other axes are applied first. The ranges count the elements of the resulting part, including padding. Used
    /// for shards of a flat buffer of several tensors, which may begin and end anywhere within a tensor. If there are fewer ranges than
    /// ranks, each range is held by equally many neighboring ranks.
    Ragged {
        /// Start of each range, followed by the end of the last one. Ascending, from 0 to the number of elements.
        bounds: Vec<usize>,
    },
    /// One rank of the axis holds the values, and the others hold nothing. Used for the units of a pipeline.
    Single {
        /// The index of the rank on the axis.
        rank: usize,
    },
    /// The ranks of the axis form sets of `num` neighbors. One rank of each set holds the values, and the others hold nothing. Used for
    /// experts, which may have several replicas.
    OneOf {
        /// In each set, the index of the rank that holds the values, from 0 to `num - 1`.
        rank: usize,
        /// The number of ranks in a set. It divides the degree of the axis.
        num: usize,
    },
}

/// The name, full shape and dtype of a tensor, and its placement along each axis of a mesh.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorPlacement {
    /// Fully qualified name, such as `transformer.h.0.attn.c_attn.weight`.
    pub name: String,
    /// Shape of the full tensor.
    pub shape: Vec<usize>,
    /// Dtype of the elements.
    pub dtype: DType,
    /// The placement for each axis of the mesh, in the order of the axes.
    pub placements: Vec<Placement>,
}

/// A rectangular box within a tensor.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Extent {
    /// First index along each dim.
    pub start: Vec<usize>,
    /// Number of indices along each dim.
    pub shape: Vec<usize>,
}

impl Extent {
    /// Returns the box that covers a full tensor of this shape.
    pub fn full(shape: &[usize]) -> Self {
        Extent { start: vec![0; shape.len()], shape: shape.to_vec() }
    }

    /// Returns the number of elements.
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the boxes that cover a range of this box's elements, which are numbered in row-major order. Returns as few boxes as
    /// possible, in order: at most `2 d - 1` for `d` dims.
    ///
    /// # Panics
    /// If `range` exceeds the number of elements.
    pub fn boxes_of_range(&self, range: Range<usize>) -> Vec<Extent> {
        assert!(range.end <= self.num_elements(), "{range:?} of {} elements", self.num_elements());
        let mut boxes = Vec::new();
        if !range.is_empty() {
            self.add_boxes_of_range(0, range, &mut boxes);
        }
        boxes
    }

    /// Implements [`boxes_of_range`](Extent::boxes_of_range) for a box with a single index in each dim before `dim`.
    fn add_boxes_of_range(&self, dim: usize, Range { start, end }: Range<usize>, boxes: &mut Vec<Extent>) {
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
            return rows(first, 1).add_boxes_of_range(dim + 1, from..to, boxes);
        }
        let first_whole = first + usize::from(from > 0);
        let end_whole = last + usize::from(to == row_len);
        if from > 0 {
            rows(first, 1).add_boxes_of_range(dim + 1, from..row_len, boxes);
        }
        if first_whole < end_whole {
            boxes.push(rows(first_whole, end_whole - first_whole));
        }
        if to < row_len {
            rows(last, 1).add_boxes_of_range(dim + 1, 0..to, boxes);
        }
    }
}

/// A rank's part of a tensor as a row-major array, before a [ragged](Placement::Ragged) placement selects a range of it. May include
/// padding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalShape {
    /// Shape of the part, including padding.
    shape: Vec<usize>,
    /// For each dim, the segments of the full tensor's dim that the part holds. The rest of the part is padding.
    segments: Vec<Vec<Segment>>,
}

impl LocalShape {
    /// Returns the part that consists of a full tensor of this shape.
    pub fn full(shape: &[usize]) -> Self {
        let segment = |&len: &usize| vec![Segment { start: 0, offset: 0, len }];
        LocalShape { shape: shape.to_vec(), segments: shape.iter().map(segment).collect() }
    }

    /// Splits dim `cut.dim` of this part again, and returns the portion that the rank at `place` holds.
    ///
    /// # Panics
    /// If `place.degree` ranks cannot split the dim, or the dim does not exist.
    pub fn split(self, cut: AxisSplit, place: AxisRank) -> Self {
        let len = self.shape[cut.dim];
        let segments: Vec<Segment> = cut.segments(len, place).collect();
        self.narrow(cut.dim, cut.part_len(len, place.degree), &segments)
    }

    /// Restricts `dim` to `segments` of its current elements. The dim then has `len` elements.
    fn narrow(mut self, dim: usize, len: usize, segments: &[Segment]) -> Self {
        let shared = |new: &Segment, old: &Segment| {
            let (start, end) = (new.start.max(old.offset), (new.start + new.len).min(old.offset + old.len));
            (start < end).then(|| Segment {
                start: old.start + start - old.offset,
                offset: new.offset + start - new.start,
                len: end - start,
            })
        };
        let old = std::mem::take(&mut self.segments[dim]);
        self.segments[dim] =
            segments.iter().flat_map(|new| old.iter().filter_map(|old| shared(new, old))).collect();
        self.shape[dim] = len;
        self
    }

    /// Returns the number of elements of the part, including padding.
    pub fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Returns the boxes of the full tensor that cover the range `held` of the part's elements, which are numbered in row-major order.
    /// Padding belongs to no box.
    pub fn boxes(&self, held: Range<usize>) -> Vec<LocalBox> {
        let mut boxes = Vec::new();
        let mut first = 0;
        for piece in Extent::full(&self.shape).boxes_of_range(held) {
            let num_elements = piece.num_elements();
            let empty = Extent { start: Vec::new(), shape: Vec::new() };
            self.add_boxes(&piece, first, (empty.clone(), empty), &mut boxes);
            first += num_elements;
        }
        boxes
    }

    /// Adds the boxes of the full tensor that cover `piece`, a box of the part. `first` is the index of the piece's first element among the
    /// elements that the rank holds. Recurses over the dims: `found` holds the leading dims of the next box, in indices of the full tensor
    /// and in indices of the part.
    fn add_boxes(&self, piece: &Extent, first: usize, found: (Extent, Extent), boxes: &mut Vec<LocalBox>) {
        let dim = found.0.start.len();
        if dim == self.shape.len() {
            let (extent, within) = found;
            return boxes.push(LocalBox { extent, piece: piece.clone(), local_extent: within, first });
        }
        let (start, end) = (piece.start[dim], piece.start[dim] + piece.shape[dim]);
        for segment in &self.segments[dim] {
            let (from, to) = (start.max(segment.offset), end.min(segment.offset + segment.len));
            if from < to {
                let (mut extent, mut within) = found.clone();
                extent.start.push(segment.start + from - segment.offset);
                within.start.push(from);
                [&mut extent, &mut within].into_iter().for_each(|found| found.shape.push(to - from));
                self.add_boxes(piece, first, (extent, within), boxes);
            }
        }
    }
}

/// A box of a tensor, and the location of its elements among the elements that a rank holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalBox {
    /// The box within the full tensor.
    pub extent: Extent,
    /// A box of the part that contains this box and is contiguous in the rank's memory.
    piece: Extent,
    /// This box, in indices of the part.
    local_extent: Extent,
    /// The index of the first element of `piece` among the elements that the rank holds.
    first: usize,
}

impl LocalBox {
    /// Returns the ranges of the box's elements among the elements that the rank holds. The box is traversed in row-major order.
    pub fn runs(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        let first = self.first;
        copy_runs(&self.local_extent, &self.piece, &self.local_extent)
            .map(move |run| first + run.source..first + run.source + run.len)
    }
}

/// The error returned when a placement does not fit its tensor or mesh.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "messages explain the fields")]
pub enum PlacementError {
    #[error("tensor '{name}' has {placements} placements on a mesh of {axes} axes")]
    WrongNumber { name: String, placements: usize, axes: usize },
    #[error(
        "tensor '{name}' is split at {bounds:?} into {degree} runs, which does not fit its {num_elements} elements"
    )]
    WrongBounds { name: String, bounds: Vec<usize>, degree: usize, num_elements: usize },
    #[error("tensor '{name}' is split over {degree} ranks as {split:?}, which does not fit {len} elements")]
    WrongSplit { name: String, split: AxisSplit, len: usize, degree: usize },
    #[error("tensor '{name}' is placed on rank {rank} of an axis of {degree}")]
    NoSuchRank { name: String, rank: usize, degree: usize },
    #[error("tensor '{name}' of shape {shape:?} has no dim {dim} to shard")]
    NoSuchDim { name: String, shape: Vec<usize>, dim: usize },
}

impl TensorPlacement {
    /// Returns the placement of a tensor that every rank of `mesh` holds in full.
    pub fn replicated(name: impl Into<String>, shape: &[usize], dtype: DType, mesh: &Mesh) -> Self {
        TensorPlacement {
            name: name.into(),
            shape: shape.to_vec(),
            dtype,
            placements: vec![Placement::Replicate; mesh.axes().len()],
        }
    }

    /// Returns the boxes of the tensor that `rank` holds, in the order of its memory. If the tensor is replicated, several ranks hold the
    /// same boxes.
    ///
    /// There is one box, unless the tensor is split in groups or into ragged ranges. There is none if the rank holds no elements.
    ///
    /// # Errors
    /// If the placements do not fit the shape or the mesh.
    ///
    /// # Panics
    /// If `rank` is outside of the mesh.
    pub fn extents(&self, mesh: &Mesh, rank: Rank) -> Result<Vec<Extent>, PlacementError> {
        Ok(self.boxes(mesh, rank)?.into_iter().map(|held| held.extent).collect())
    }

    /// Returns the boxes of [`extents`](TensorPlacement::extents), with the locations of their elements in the rank's memory.
    ///
    /// # Errors
    /// As [`extents`](TensorPlacement::extents).
    ///
    /// # Panics
    /// If `rank` is outside of the mesh.
    pub fn boxes(&self, mesh: &Mesh, rank: Rank) -> Result<Vec<LocalBox>, PlacementError> {
        let (part, held) = self.local_part(mesh, rank)?;
        Ok(part.boxes(held))
    }

    /// Returns the part of the tensor that the placements assign to `rank`, and the range of its elements that the rank holds. The range is
    /// all of the part, unless a placement is ragged or assigns the tensor to other ranks.
    ///
    /// # Errors
    /// If the placements do not fit the shape or the mesh.
    ///
    /// # Panics
    /// If `rank` is outside of the mesh.
    pub fn local_part(&self, mesh: &Mesh, rank: Rank) -> Result<(LocalShape, Range<usize>), PlacementError> {
        if self.placements.len() != mesh.axes().len() {
            return Err(PlacementError::WrongNumber {
                name: self.name.clone(),
                placements: self.placements.len(),
                axes: mesh.axes().len(),
            });
        }
        let (mut part, mut bounds, mut is_elsewhere) = (LocalShape::full(&self.shape), None, false);
        let positions = mesh.coordinates(rank);
        for ((placement, &(_, degree)), position) in self.placements.iter().zip(mesh.axes()).zip(positions) {
            let place = AxisRank::new(position, degree);
            match placement {
                Placement::Replicate => (),
                Placement::Shard { dim } => part = self.shard(part, *dim, place)?,
                Placement::Split(cut) => part = self.split(part, *cut, place)?,
                Placement::Single { rank } if *rank >= degree => {
                    return Err(PlacementError::NoSuchRank { name: self.name.clone(), rank: *rank, degree });
                }
                Placement::Single { rank } => is_elsewhere |= *rank != position,
                Placement::OneOf { rank, num } if *rank >= *num || !degree.is_multiple_of(*num) => {
                    return Err(PlacementError::NoSuchRank { name: self.name.clone(), rank: *rank, degree });
                }
                Placement::OneOf { rank, num } => is_elsewhere |= position % num != *rank,
                Placement::Ragged { bounds: found } => bounds = Some((found, place)),
            }
        }
        let held = match bounds {
            _ if is_elsewhere => 0..0,
            None => 0..part.num_elements(),
            Some((bounds, place)) => self.ragged(bounds, part.num_elements(), place)?,
        };
        Ok((part, held))
    }

    /// Returns whether no lower rank holds the elements that `rank` [holds](TensorPlacement::local_part). If each rank counts only the
    /// elements of which it is the first holder, all ranks together count each element once.
    ///
    /// # Panics
    /// If `rank` is outside of the mesh.
    pub fn is_first_holder(&self, mesh: &Mesh, rank: Rank) -> bool {
        let positions = mesh.coordinates(rank);
        self.placements.iter().zip(mesh.axes()).zip(positions).all(|((placement, &(_, degree)), position)| {
            let num_holders = match placement {
                Placement::Replicate => degree,
                Placement::Shard { .. } | Placement::Single { .. } => 1,
                Placement::Split(cut) => {
                    self.shape.get(cut.dim).and_then(|&len| cut.num_holders(len, degree)).unwrap_or(1)
                }
                Placement::OneOf { num, .. } => return position < *num,
                Placement::Ragged { bounds } => degree / bounds.len().saturating_sub(1).max(1),
            };
            position.is_multiple_of(num_holders.max(1))
        })
    }

    fn no_such_dim(&self, dim: usize) -> PlacementError {
        let (name, shape) = (self.name.clone(), self.shape.clone());
        PlacementError::NoSuchDim { name, shape, dim }
    }

    fn shard(&self, part: LocalShape, dim: usize, place: AxisRank) -> Result<LocalShape, PlacementError> {
        let &len = part.shape.get(dim).ok_or_else(|| self.no_such_dim(dim))?;
        let (base, longer) = (len / place.degree, len % place.degree);
        let start = place.rank * base + place.rank.min(longer);
        let len = base + usize::from(place.rank < longer);
        Ok(part.narrow(dim, len, &[Segment { start, offset: 0, len }]))
    }

    fn split(&self, part: LocalShape, cut: AxisSplit, place: AxisRank) -> Result<LocalShape, PlacementError> {
        let &len = part.shape.get(cut.dim).ok_or_else(|| self.no_such_dim(cut.dim))?;
        if cut.num_holders(len, place.degree).is_none() {
            let (name, degree) = (self.name.clone(), place.degree);
            return Err(PlacementError::WrongSplit { name, split: cut, len, degree });
        }
        Ok(part.split(cut, place))
    }

    fn ragged(
        &self,
        bounds: &[usize],
        num_elements: usize,
        place: AxisRank,
    ) -> Result<Range<usize>, PlacementError> {
        let (degree, num_runs) = (place.degree, bounds.len().saturating_sub(1));
        let is_valid = num_runs > 0
            && degree.is_multiple_of(num_runs)
            && bounds.is_sorted()
            && (bounds[0], bounds[num_runs]) == (0, num_elements);
        if !is_valid {
            let (name, bounds) = (self.name.clone(), bounds.to_vec());
            return Err(PlacementError::WrongBounds { name, bounds, degree, num_elements });
        }
        let run = place.rank / (degree / num_runs);
        Ok(bounds[run]..bounds[run + 1])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::Axis;
    use proptest::prelude::*;

    fn sharded(size: usize, degree: usize) -> Vec<Option<(usize, usize)>> {
        let mesh = Mesh::new(&[(Axis::DATA_REPLICATE, degree)]).unwrap();
        let tensor = TensorPlacement {
            name: "w".into(),
            shape: vec![4, size],
            dtype: DType::F32,
            placements: vec![Placement::Shard { dim: 1 }],
        };
        let part = |rank| tensor.extents(&mesh, Rank(rank)).unwrap().pop();
        (0..degree).map(|rank| part(rank).map(|part| (part.start[1], part.shape[1]))).collect()
    }

    #[test]
    fn shards_are_consecutive_and_cover_the_dim() {
        assert_eq!(sharded(6, 2), [Some((0, 3)), Some((3, 3))]);
        assert_eq!(sharded(7, 3), [Some((0, 3)), Some((3, 2)), Some((5, 2))]);
        assert_eq!(sharded(1, 3), [Some((0, 1)), None, None]);
    }

    #[test]
    fn a_tensor_on_one_pipeline_rank_is_sharded_on_the_other_axis() {
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
    fn a_range_of_elements_is_split_into_few_boxes() {
        let whole = Extent { start: vec![1, 0, 2], shape: vec![3, 2, 4] };
        let boxes = |range: Range<usize>| -> Vec<(Vec<usize>, Vec<usize>)> {
            whole.boxes_of_range(range).into_iter().map(|part| (part.start, part.shape)).collect()
        };
        assert_eq!(boxes(0..24), [(vec![1, 0, 2], vec![3, 2, 4])]);
        assert_eq!(boxes(8..24), [(vec![2, 0, 2], vec![2, 2, 4])]);
        assert_eq!(boxes(9..11), [(vec![2, 0, 3], vec![1, 1, 2])]);
        assert_eq!(boxes(5..5), []);
        let several = [
            (vec![1, 0, 5], vec![1, 1, 1]),
            (vec![1, 1, 2], vec![1, 1, 4]),
            (vec![2, 0, 2], vec![1, 2, 4]),
            (vec![3, 0, 2], vec![1, 1, 2]),
        ];
        assert_eq!(boxes(3..18), several);
        assert_eq!(Extent::full(&[]).boxes_of_range(0..1), [Extent::full(&[])]);
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
    fn first_holders_have_each_element_once() {
        use Placement::{OneOf, Ragged, Replicate, Shard, Single, Split as CutAlong};
        let mesh = Mesh::new(&[(Axis::DATA_REPLICATE, 2), (Axis::DATA_SHARD, 4), (Axis::TENSOR, 4)]).unwrap();
        let shared = CutAlong(AxisSplit::along(0).with_granule(6).shared());
        let padded = CutAlong(AxisSplit::along(0).padded());
        for placements in [
            [Replicate, Replicate, Replicate],
            [Single { rank: 1 }, Shard { dim: 0 }, Replicate],
            [OneOf { rank: 1, num: 2 }, OneOf { rank: 1, num: 2 }, Shard { dim: 0 }],
            [Replicate, Ragged { bounds: vec![0, 5, 12] }, Replicate],
            [Replicate, Ragged { bounds: vec![0, 2, 2, 5, 6] }, shared],
            [OneOf { rank: 0, num: 1 }, Replicate, padded],
        ] {
            let tensor = TensorPlacement {
                name: "w".into(),
                shape: vec![12],
                dtype: DType::F32,
                placements: placements.to_vec(),
            };
            let mut counts = [0; 12];
            for rank in (0..mesh.num_ranks()).map(Rank).filter(|&rank| tensor.is_first_holder(&mesh, rank)) {
                for Extent { start, shape } in tensor.extents(&mesh, rank).unwrap() {
                    counts[start[0]..start[0] + shape[0]].iter_mut().for_each(|count| *count += 1);
                }
            }
            assert_eq!(counts, [1; 12], "{:?}", tensor.placements);
        }
    }

    #[test]
    fn parts_of_groups_are_contiguous_in_memory() {
        let mesh = Mesh::new(&[(Axis::DATA_SHARD, 2), (Axis::TENSOR, 2)]).unwrap();
        let tensor = TensorPlacement {
            name: "qkv".into(),
            shape: vec![3, 12],
            dtype: DType::F32,
            placements: vec![
                Placement::Ragged { bounds: vec![0, 8, 18] },
                Placement::Split(AxisSplit::along(1).with_groups(3).with_granule(2)),
            ],
        };
        let mut found = vec![0; 36];
        for rank in 0..4 {
            let boxes = tensor.boxes(&mesh, Rank(rank)).unwrap();
            let mut held = Vec::new();
            for part in &boxes {
                let Extent { start, shape } = &part.extent;
                let positions = (0..shape[0])
                    .flat_map(|row| (0..shape[1]).map(move |col| (start[0] + row) * 12 + start[1] + col));
                let places = part.runs().flatten();
                held.extend(places.zip(positions));
            }
            held.sort_unstable();
            let places: Vec<usize> = held.iter().map(|(place, _)| *place).collect();
            assert_eq!(places, (0..[8, 10][rank / 2]).collect::<Vec<_>>());
            // Each row of the part consists of the rank's columns of every group.
            for (place, position) in held {
                let (row, col) = ((place + 8 * (rank / 2)) / 6, (place + 8 * (rank / 2)) % 6);
                assert_eq!(position, row * 12 + col / 2 * 4 + rank % 2 * 2 + col % 2);
                found[position] += 1;
            }
        }
        assert_eq!(found, [1; 36]);
        let uneven = TensorPlacement {
            placements: vec![Placement::Replicate, Placement::Split(AxisSplit::along(0))],
            ..tensor
        };
        assert!(matches!(uneven.extents(&mesh, Rank(0)), Err(PlacementError::WrongSplit { degree: 2, .. })));
    }

    #[test]
    fn refuses_placements_that_do_not_fit() {
        let mesh = Mesh::data_parallel(2);
        let mut tensor = TensorPlacement::replicated("w", &[4], DType::F32, &mesh);
        assert_eq!(tensor.extents(&mesh, Rank(1)), Ok(vec![Extent::full(&[4])]));
        tensor.placements = vec![Placement::Shard { dim: 1 }];
        assert!(matches!(tensor.extents(&mesh, Rank(0)), Err(PlacementError::NoSuchDim { dim: 1, .. })));
        for bounds in [vec![], vec![0, 1, 2, 4], vec![0, 2, 3], vec![1, 2, 4], vec![0, 5, 4]] {
            tensor.placements = vec![Placement::Ragged { bounds }];
            assert!(matches!(tensor.extents(&mesh, Rank(0)), Err(PlacementError::WrongBounds { .. })));
        }
        tensor.placements.clear();
        assert!(matches!(tensor.extents(&mesh, Rank(0)), Err(PlacementError::WrongNumber { .. })));
    }
}
