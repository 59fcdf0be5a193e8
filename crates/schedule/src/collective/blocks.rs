use super::assert_member;
use std::ops::Range;
use trireme_base::Rank;

/// The block of `rank` when `len` elements are split as evenly as they can be: the first `len % world_size` blocks
/// have one element more.
///
/// This is where a rank's share of a vector lies in every collective that distributes one. The blocks of consecutive
/// ranks are themselves an even split of the elements they cover.
///
/// # Panics
/// If `rank` is not below `world_size`.
pub fn block(rank: Rank, world_size: usize, len: usize) -> Range<usize> {
    assert_member(rank, world_size);
    border(rank.0, world_size, len)..border(rank.0 + 1, world_size, len)
}

/// The first element of block `index` of an even split into `num_blocks`.
fn border(index: usize, num_blocks: usize, len: usize) -> usize {
    let (share, rest) = (len / num_blocks, len % num_blocks);
    share * index + rest.min(index)
}

/// Where the blocks of the ranks of one operation lie: out of an even split, each takes `run` blocks, and its next
/// neighbour begins `stride` blocks further on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Blocks {
    len: usize,
    num_blocks: usize,
    first: usize,
    stride: usize,
    run: usize,
}

impl Blocks {
    /// [`block`] of every rank.
    pub(super) fn even(world_size: usize, len: usize) -> Self {
        Blocks { len, num_blocks: world_size, first: 0, stride: 1, run: 1 }
    }

    /// Of `num_blocks`, all blocks of a host of `ranks_per_host` ranks for the one rank of it that takes part.
    pub(super) fn of_hosts(num_blocks: usize, ranks_per_host: usize, len: usize) -> Self {
        Blocks { len, num_blocks, first: 0, stride: ranks_per_host, run: ranks_per_host }
    }

    /// Of `num_blocks`, the own block of the rank with that number on each host.
    pub(super) fn of_column(num_blocks: usize, ranks_per_host: usize, local_rank: usize, len: usize) -> Self {
        Blocks { len, num_blocks, first: local_rank, stride: ranks_per_host, run: 1 }
    }

    /// Whether the blocks of consecutive ranks touch.
    pub(super) fn are_contiguous(&self) -> bool {
        self.stride == self.run
    }

    /// The block of a rank.
    pub(super) fn of(&self, rank: usize) -> Range<usize> {
        let first = self.first + rank * self.stride;
        let at = |index| border(index, self.num_blocks, self.len);
        at(first)..at(first + self.run)
    }

    /// The blocks of consecutive ranks, as one range; they must touch.
    pub(super) fn of_all(&self, ranks: Range<usize>) -> Range<usize> {
        debug_assert!(self.are_contiguous(), "blocks with gaps are no range");
        let at = |rank| border(self.first + rank * self.stride, self.num_blocks, self.len);
        at(ranks.start)..at(ranks.end)
    }
}
