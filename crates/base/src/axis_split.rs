//! How dims of tensors are split among the ranks of the tensor axis.
//!
//! A padded split fills short parts with zeros up to the common length, so the flat buffers of all ranks have the same layout. Shards, sums
//! over ranks and checkpoints then need no special case.

use std::ops::Range;

/// The position of a rank on an axis.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AxisRank {
    /// The rank's index on the axis, from 0 to `degree - 1`.
    pub rank: usize,
    /// Number of ranks on the axis.
    pub degree: usize,
}

impl AxisRank {
    /// The position of the only rank of an axis.
    pub const ALONE: AxisRank = AxisRank { rank: 0, degree: 1 };

    /// Returns the position of rank `rank` on an axis of `degree` ranks.
    ///
    /// # Panics
    /// If `rank` is not less than `degree`.
    pub fn new(rank: usize, degree: usize) -> Self {
        assert!(rank < degree, "rank {rank} of {degree}");
        AxisRank { rank, degree }
    }

    /// Returns the positions of all ranks on an axis of `degree` ranks, in order.
    pub fn all(degree: usize) -> impl Iterator<Item = AxisRank> {
        (0..degree).map(move |rank| AxisRank { rank, degree })
    }
}

impl Default for AxisRank {
    fn default() -> Self {
        AxisRank::ALONE
    }
}

/// How tensor parallelism splits one dim of a parameter.
///
/// The dim consists of `num_groups` equal groups, and each rank holds an equal part of every group. A granule is a number of consecutive
/// elements that are never split, so a part consists of full granules. Example: a fused projection to queries, keys and values has three
/// groups, and its granule is the width of a head.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AxisSplit {
    /// Index of the dim that is split.
    pub dim: usize,
    /// Number of equal groups in the dim. Each rank holds a part of every group.
    pub num_groups: usize,
    /// Number of consecutive elements of the dim that are never split, such as the width of a head.
    pub granule: usize,
    /// Whether several ranks may hold the same granule if there are fewer granules than ranks. Used for heads of keys and values, which
    /// several query heads read.
    pub is_shared: bool,
    /// Whether the last rank may hold fewer elements than the others. Its part is then padded with zeros. Used for the rows of a
    /// vocabulary.
    pub is_padded: bool,
}

/// Consecutive elements of a dim that a rank holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// Index of the first element within the full dim.
    pub start: usize,
    /// Index of the first element within the rank's part of the dim.
    pub offset: usize,
    /// Number of elements.
    pub len: usize,
}

impl AxisSplit {
    /// Returns a split along `dim` that is possible at any element: one group, granules of one element, neither shared nor padded.
    pub fn along(dim: usize) -> Self {
        AxisSplit { dim, num_groups: 1, granule: 1, is_shared: false, is_padded: false }
    }

    /// Sets the number of consecutive elements that are never split.
    pub fn with_granule(self, granule: usize) -> Self {
        AxisSplit { granule, ..self }
    }

    /// Sets the number of groups.
    pub fn with_groups(self, num_groups: usize) -> Self {
        AxisSplit { num_groups, ..self }
    }

    /// Allows several ranks to hold the same granule if there are fewer granules than ranks.
    pub fn shared(self) -> Self {
        AxisSplit { is_shared: true, ..self }
    }

    /// Allows the last rank to hold fewer elements than the others, with its part padded to the common length.
    ///
    /// # Panics
    /// If the split has several groups, or granules of more than one element.
    pub fn padded(self) -> Self {
        assert_eq!(
            (self.num_groups, self.granule),
            (1, 1),
            "a padded split has one group and granules of one element"
        );
        AxisSplit { is_padded: true, ..self }
    }

    /// Returns the number of granules in each group of a dim of `len` elements.
    pub fn num_granules(self, len: usize) -> usize {
        len / self.num_groups.saturating_mul(self.granule).max(1)
    }

    /// Returns how many of `degree` ranks hold the same elements of a dim of `len` elements, or `None` if this many ranks cannot split the
    /// dim.
    pub fn num_holders(self, len: usize, degree: usize) -> Option<usize> {
        let num_granules = self.num_granules(len);
        let has_all = |part: usize| part * (degree - 1) < len;
        if num_granules.is_multiple_of(degree)
            || (self.is_padded && degree > 0 && has_all(len.div_ceil(degree)))
        {
            return Some(1);
        }
        let may_share = self.is_shared && num_granules > 0 && degree.is_multiple_of(num_granules);
        may_share.then(|| degree / num_granules)
    }

    /// Returns the elements that a rank holds of a dim of `len` elements: one segment for each group, in order.
    ///
    /// # Panics
    /// If `place.degree` ranks cannot split the dim.
    pub fn segments(self, len: usize, place: AxisRank) -> impl Iterator<Item = Segment> + Clone {
        let num_holders = self.num_holders(len, place.degree).expect("the split was checked");
        let group_len = len / self.num_groups;
        let part = group_len.div_ceil(place.degree / num_holders);
        let first = (place.rank / num_holders * part).min(group_len);
        (0..self.num_groups).map(move |group| Segment {
            start: group * group_len + first,
            offset: group * part,
            len: part.min(group_len - first),
        })
    }

    /// Returns the length of each rank's part of a dim of `len` elements, including padding. All ranks have the same length.
    ///
    /// # Panics
    /// If `degree` ranks cannot split the dim.
    pub fn part_len(self, len: usize, degree: usize) -> usize {
        let num_holders = self.num_holders(len, degree).expect("the split was checked");
        self.num_groups * (len / self.num_groups).div_ceil(degree / num_holders)
    }

    /// Maps a range of a rank's part to runs of consecutive elements of the full tensor.
    ///
    /// The full tensor has the given `shape`, and both the tensor and the part are row-major. `held` is the range of elements within the
    /// part. Each item is the index of a run's first element in the full tensor, and the run's range within the part. Padding belongs to no
    /// run.
    ///
    /// # Panics
    /// If `place.degree` ranks cannot split the dim.
    pub fn runs(
        self,
        shape: &[usize],
        place: AxisRank,
        held: Range<usize>,
    ) -> impl Iterator<Item = (usize, Range<usize>)> + use<> {
        let len = shape[self.dim];
        let row_len: usize = shape[self.dim + 1..].iter().product();
        let (part_row, whole_row) = (self.part_len(len, place.degree) * row_len, len * row_len);
        let rows = held.start / part_row.max(1)..held.end.div_ceil(part_row.max(1));
        let segments = self.segments(len, place);
        let runs = rows.flat_map(move |row| {
            segments.clone().map(move |segment| {
                let first = row * part_row + segment.offset * row_len;
                (row * whole_row + segment.start * row_len, first..first + segment.len * row_len)
            })
        });
        runs.filter_map(move |(start, part)| {
            let range = part.start.max(held.start)..part.end.min(held.end);
            (!range.is_empty()).then(|| (start + range.start - part.start, range))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held(split: AxisSplit, len: usize, degree: usize) -> Vec<Vec<[usize; 2]>> {
        let range = |segment: Segment| [segment.start, segment.start + segment.len];
        AxisRank::all(degree).map(|place| split.segments(len, place).map(range).collect()).collect()
    }

    #[test]
    fn ranks_hold_equal_parts_of_each_group() {
        assert_eq!(held(AxisSplit::along(0), 6, 2), [[[0, 3]], [[3, 6]]]);
        let qkv = AxisSplit::along(1).with_groups(3).with_granule(2);
        assert_eq!(held(qkv, 12, 2), [[[0, 2], [4, 6], [8, 10]], [[2, 4], [6, 8], [10, 12]]]);
        let places: Vec<usize> =
            qkv.segments(12, AxisRank::new(1, 2)).map(|segment| segment.offset).collect();
        assert_eq!(places, [0, 2, 4]);
        assert_eq!(qkv.part_len(12, 2), 6);
    }

    #[test]
    fn shared_splits_allow_fewer_granules_than_ranks() {
        let heads = AxisSplit::along(0).with_granule(4);
        assert_eq!([1, 2, 3, 4].map(|degree| heads.num_holders(8, degree)), [Some(1), Some(1), None, None]);
        let shared = heads.shared();
        assert_eq!(
            [2, 3, 4, 6].map(|degree| shared.num_holders(8, degree)),
            [Some(1), None, Some(2), Some(3)]
        );
        assert_eq!(held(shared, 8, 4), [[[0, 4]], [[0, 4]], [[4, 8]], [[4, 8]]]);
    }

    #[test]
    fn the_last_part_of_a_padded_split_may_be_shorter() {
        let rows = AxisSplit::along(0).padded();
        assert_eq!(held(rows, 5, 2), [[[0, 3]], [[3, 5]]]);
        assert_eq!(held(rows, 8, 3), [[[0, 3]], [[3, 6]], [[6, 8]]]);
        assert_eq!((rows.part_len(5, 2), rows.part_len(8, 3)), (3, 3));
        assert_eq!(rows.num_holders(5, 4), None, "the last rank would have none");
        let runs: Vec<_> = rows.runs(&[5, 2], AxisRank::new(1, 2), 0..6).collect();
        assert_eq!(runs, [(6, 0..4)]);
    }

    #[test]
    fn runs_map_a_part_to_the_full_tensor() {
        let shape = [2, 6, 2];
        let cuts = [
            AxisSplit::along(0),
            AxisSplit::along(1),
            AxisSplit::along(1).with_groups(3),
            AxisSplit::along(2),
        ];
        for split in cuts {
            let mut found = vec![0; 24];
            for place in AxisRank::all(2) {
                for start in 0..12 {
                    for end in start..=12 {
                        let mut next = start;
                        for (first, part) in split.runs(&shape, place, start..end) {
                            assert_eq!(part.start, next);
                            next = part.end;
                            if (start, end) == (0, 12) {
                                (first..first + part.len()).for_each(|element| found[element] += 1);
                            }
                        }
                        assert_eq!(next, end, "{split:?} {place:?} {start}..{end}");
                    }
                }
            }
            assert_eq!(found, [1; 24]);
        }
        let grouped = AxisSplit::along(1).with_groups(3);
        let runs: Vec<_> = grouped.runs(&shape, AxisRank::new(1, 2), 1..8).collect();
        assert_eq!(runs, [(3, 1..2), (6, 2..4), (10, 4..6), (14, 6..8)]);
    }
}
