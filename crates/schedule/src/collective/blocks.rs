use super::hosts::{Hosts, assert_member};
use std::ops::Range;
use trireme_base::Rank;

/// Returns the block of `rank` in an even split of `len` elements. The first `len % world_size` blocks are one element longer.
///
/// This is a rank's share in every collective that distributes a vector. The blocks of consecutive ranks are also an even split of the
/// range that they cover.
///
/// # Panics
/// If `rank` is not below `world_size`.
pub fn block(rank: Rank, world_size: usize, len: usize) -> Range<usize> {
    assert_member(rank, world_size);
    border(rank.0, world_size, len)..border(rank.0 + 1, world_size, len)
}

/// Maximum bytes of a segment, so that it stays in cache from one step to the next on both sides of a link.
const SEGMENT_BYTES: usize = 1 << 20;

/// Returns the segments into which an all-reduce splits a vector. Within one host these are as few and as even as possible, of at most 1
/// MiB, because a longer vector leaves the caches between steps. Between hosts there is one segment, because each further step costs a
/// latency.
///
/// Each segment runs all steps of the algorithm. The total bytes stay the same. A canonical algorithm also reduces each segment in the
/// canonical order.
pub fn segments(
    hosts: &Hosts,
    len: usize,
    element_bytes: usize,
) -> impl Iterator<Item = Range<usize>> + use<> {
    let num_segments = match hosts.num_hosts() {
        1 => (len * element_bytes).div_ceil(SEGMENT_BYTES).max(1),
        _ => 1,
    };
    (0..num_segments).map(move |index| border(index, num_segments, len)..border(index + 1, num_segments, len))
}

/// Returns the elements that `rank` computes in a direct all-reduce. The rank reads this range of every rank's buffer, reduces it in the
/// order of [`canonical_order`](super::canonical_order) and writes the result into every buffer, all between two synchronizations.
///
/// The ranges cover `0..len` in rank order. Inner borders are multiples of `granule` elements, so that no two ranks write one cache line.
///
/// # Panics
/// If `rank` is not below `world_size`, or `granule` is 0.
pub fn owned_range(rank: Rank, world_size: usize, len: usize, granule: usize) -> Range<usize> {
    let granules = block(rank, world_size, len.div_ceil(granule));
    (granules.start * granule).min(len)..(granules.end * granule).min(len)
}

/// Returns the first element of block `index` in an even split of `len` elements into `num_blocks`.
fn border(index: usize, num_blocks: usize, len: usize) -> usize {
    let (share, rest) = (len / num_blocks, len % num_blocks);
    share * index + rest.min(index)
}

/// The blocks of an operation's ranks in an even split. Each rank owns `run` consecutive blocks; the next rank's blocks begin `stride`
/// blocks later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Blocks {
    pub(super) len: usize,
    num_blocks: usize,
    first: usize,
    stride: usize,
    run: usize,
}

impl Blocks {
    /// Creates one [`block`] per rank.
    pub(super) fn even(world_size: usize, len: usize) -> Self {
        Blocks { len, num_blocks: world_size, first: 0, stride: 1, run: 1 }
    }

    /// Creates the blocks of one rank per host, which owns all `ranks_per_host` blocks of its host, out of `num_blocks`.
    pub(super) fn of_hosts(num_blocks: usize, ranks_per_host: usize, len: usize) -> Self {
        Blocks { len, num_blocks, first: 0, stride: ranks_per_host, run: ranks_per_host }
    }

    /// Creates the blocks of the ranks with `local_rank`, one rank on each host. Each rank owns one of the `num_blocks` blocks.
    pub(super) fn of_column(num_blocks: usize, ranks_per_host: usize, local_rank: usize, len: usize) -> Self {
        Blocks { len, num_blocks, first: local_rank, stride: ranks_per_host, run: 1 }
    }

    pub(super) fn world_size(&self) -> usize {
        self.num_blocks / self.stride
    }

    pub(super) fn are_contiguous(&self) -> bool {
        self.stride == self.run
    }

    pub(super) fn of(&self, rank: usize) -> Range<usize> {
        let first = self.first + rank * self.stride;
        let at = |index| border(index, self.num_blocks, self.len);
        at(first)..at(first + self.run)
    }

    /// Returns the blocks of consecutive ranks as one range. Requires contiguous blocks.
    pub(super) fn of_all(&self, ranks: Range<usize>) -> Range<usize> {
        debug_assert!(self.are_contiguous(), "blocks with gaps are no range");
        let at = |rank| border(self.first + rank * self.stride, self.num_blocks, self.len);
        at(ranks.start)..at(ranks.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn segments_are_even_parts_in_order_within_a_host_and_one_part_between_hosts() {
        let one = Hosts::single(4);
        for (len, element_bytes, num_segments) in
            [(0, 4, 1), (1, 4, 1), (1 << 18, 4, 1), ((1 << 18) + 1, 4, 2), (10_000_003, 8, 77), (999, 2, 1)]
        {
            let found: Vec<Range<usize>> = segments(&one, len, element_bytes).collect();
            assert_eq!(found.len(), num_segments);
            assert_eq!((found[0].start, found[num_segments - 1].end), (0, len));
            assert!(found.windows(2).all(|pair| pair[0].end == pair[1].start));
            assert!(found.iter().all(|segment| segment.len() * element_bytes <= SEGMENT_BYTES));
            assert!(found.iter().all(|segment| segment.len().abs_diff(found[0].len()) <= 1));
        }
        let several = Hosts::new(&[0, 0, 1]);
        assert!(segments(&several, 10_000_003, 8).eq(std::iter::once(0..10_000_003)));
    }
}
