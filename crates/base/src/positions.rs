//! The positions of a sequence that a rank holds with context parallelism.

use crate::AxisRank;
use std::ops::Range;

/// The position of a rank among the ranks of the context axis, which share the tokens of the same sequences.
///
/// There are two ways to share a sequence. In ring attention, keys and values travel around a ring of ranks (Liu et al., "Ring attention",
/// 2023). In Ulysses attention, an all-to-all gives each rank all positions for a part of the heads (Jacobs et al., "DeepSpeed Ulysses",
/// 2023). If both are used, several neighboring ranks share each place on the ring. They exchange positions for heads before keys and
/// values travel around the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ContextRank {
    /// The place on the ring.
    pub ring: AxisRank,
    /// The place in the group of ranks that share `ring`. The ranks of this group exchange positions for heads.
    pub heads: AxisRank,
}

impl ContextRank {
    /// The place of a rank that holds all positions.
    pub const ALONE: ContextRank = ContextRank { ring: AxisRank::ALONE, heads: AxisRank::ALONE };

    /// Returns the place of a rank of the context axis. Each set of `heads_degree` neighboring ranks exchanges positions for heads, and
    /// shares one place on the ring.
    ///
    /// # Panics
    /// If `heads_degree` does not divide the degree of the axis.
    pub fn new(AxisRank { rank, degree }: AxisRank, heads_degree: usize) -> Self {
        assert!(degree.is_multiple_of(heads_degree), "{heads_degree} of {degree} ranks exchange heads");
        ContextRank {
            ring: AxisRank::new(rank / heads_degree, degree / heads_degree),
            heads: AxisRank::new(rank % heads_degree, heads_degree),
        }
    }

    /// Returns the number of ranks that share a sequence.
    pub fn degree(self) -> usize {
        self.ring.degree * self.heads.degree
    }

    /// Returns the positions, in a sequence of `len` positions, that the ranks at this rank's place on the ring hold together. After the
    /// all-to-all, this rank holds all of these positions for its part of the heads.
    ///
    /// # Panics
    /// If `len` is not a multiple of twice the number of places on the ring, and the ring has several places.
    pub fn ring_positions(self, len: usize) -> Positions {
        Positions::zig_zag(len, self.ring)
    }

    /// Returns the positions, in a sequence of `len` positions, that this rank holds.
    ///
    /// # Panics
    /// If `len` is not a multiple of twice the number of ranks, and there are several ranks.
    pub fn positions(self, len: usize) -> Positions {
        assert!(len.is_multiple_of(2 * self.degree()) || self.degree() == 1, "{len} positions for {self:?}");
        let own_len = len / self.degree();
        self.ring_positions(len).part(self.heads.rank * own_len..(self.heads.rank + 1) * own_len)
    }
}

/// An ascending list of at most two runs of consecutive positions in a sequence. Because the list is ascending, the positions within an
/// interval of the sequence are a contiguous range of the list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Positions {
    first: usize,
    /// Number of positions before `second`.
    first_len: usize,
    second: usize,
    len: usize,
}

impl Positions {
    /// Returns the `len` consecutive positions that start at `first`.
    pub fn run(first: usize, len: usize) -> Self {
        Positions { first, first_len: len, second: first.saturating_add(len), len }
    }

    /// Returns the first position and the number of positions of the first run, the first position of the second, and the number of
    /// positions.
    pub fn to_array(self) -> [usize; 4] {
        [self.first, self.first_len, self.second, self.len]
    }

    /// Returns a rank's positions of a sequence of `len` positions in the zig-zag layout, which balances the work of causal attention.
    ///
    /// The sequence is split into twice as many equal parts as there are ranks. Rank `i` holds part `i` from the front and part `i` from
    /// the end, so every rank has the same number of pairs of a query and an earlier key.
    ///
    /// # Panics
    /// If `len` is not a multiple of twice the degree, and the degree is more than 1.
    pub fn zig_zag(len: usize, AxisRank { rank, degree }: AxisRank) -> Self {
        if degree == 1 {
            return Positions::run(0, len);
        }
        assert!(len.is_multiple_of(2 * degree), "{len} positions for {degree} ranks");
        let part = len / (2 * degree);
        Positions {
            first: rank * part,
            first_len: part,
            second: (2 * degree - 1 - rank) * part,
            len: 2 * part,
        }
    }

    /// Returns the positions with indices in `range`.
    ///
    /// # Panics
    /// If the range exceeds the list.
    pub fn part(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {self:?}");
        let Positions { first, first_len, second, .. } = self;
        if range.start >= first_len {
            return Positions::run(second + range.start - first_len, range.len());
        }
        let first_len = range.end.min(first_len) - range.start;
        Positions { first: first + range.start, first_len, second, len: range.len() }
    }

    /// Returns the number of positions.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether there are no positions.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the position at `index`. Does not check that `index` is less than [`len`](Positions::len).
    pub fn at(&self, index: usize) -> usize {
        if index < self.first_len { self.first + index } else { self.second + index - self.first_len }
    }

    /// Returns how many of the listed positions are less than `position`.
    pub fn num_before(&self, position: usize) -> usize {
        let num_in_first = position.saturating_sub(self.first).min(self.first_len);
        num_in_first + position.saturating_sub(self.second).min(self.len - self.first_len)
    }

    /// Returns the runs of consecutive positions: the index of the run's first position in the list, and the positions. Empty runs are
    /// omitted.
    pub fn runs(&self) -> impl Iterator<Item = (usize, Range<usize>)> + use<> {
        let Positions { first, first_len, second, len } = *self;
        let runs = [(0, first..first + first_len), (first_len, second..second + (len - first_len))];
        runs.into_iter().filter(|(_, run)| !run.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_have_all_positions_and_equally_many_pairs() {
        for degree in 1..6 {
            let len = 6 * degree;
            let rank_positions: Vec<Positions> =
                AxisRank::all(degree).map(|place| Positions::zig_zag(len, place)).collect();
            let mut all: Vec<usize> =
                rank_positions.iter().flat_map(|of| (0..of.len()).map(|i| of.at(i))).collect();
            all.sort_unstable();
            assert!(all.into_iter().eq(0..len), "{degree}");
            let num_pairs =
                |positions: &Positions| (0..positions.len()).map(|index| positions.at(index)).sum::<usize>();
            assert!(
                rank_positions.iter().all(|of| num_pairs(of) == num_pairs(&rank_positions[0])),
                "{degree}"
            );
        }
    }

    #[test]
    fn ranks_that_share_a_ring_place_hold_its_positions_together() {
        let places = AxisRank::all(6).map(|place| ContextRank::new(place, 3));
        let mut all = Vec::new();
        for place in places {
            let own = place.positions(24);
            assert_eq!((own.len(), place.degree()), (4, 6));
            all.extend((0..own.len()).map(|index| own.at(index)));
        }
        let ring_positions = AxisRank::all(2).map(|place| Positions::zig_zag(24, place));
        assert!(
            all.into_iter().eq(ring_positions.flat_map(|of| (0..of.len()).map(move |index| of.at(index))))
        );
        let own = ContextRank::new(AxisRank::new(2, 4), 4).positions(16);
        assert!(own.runs().eq([(0, 8..12)]));
    }

    #[test]
    fn indices_positions_and_parts_agree() {
        let whole = Positions::zig_zag(24, AxisRank::new(1, 3));
        for (start, end) in [(0, 8), (0, 3), (2, 7), (5, 8), (4, 4), (0, 4), (8, 8)] {
            let part = whole.part(start..end);
            assert_eq!(part.len(), end - start);
            let positions: Vec<usize> = (0..part.len()).map(|index| part.at(index)).collect();
            assert!(positions.iter().copied().eq((start..end).map(|index| whole.at(index))));
            for position in 0..26 {
                let before = positions.iter().filter(|at| **at < position).count();
                assert_eq!(part.num_before(position), before, "{start}..{end} before {position}");
            }
            let runs =
                part.runs().flat_map(|(index, run)| run.enumerate().map(move |(i, at)| (index + i, at)));
            assert!(runs.eq(positions.into_iter().enumerate()));
        }
    }
}
