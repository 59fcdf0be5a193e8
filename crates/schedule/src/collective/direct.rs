use super::assert_member;
use std::ops::Range;
use trireme_base::Rank;

/// The elements that `rank` computes in a direct all-reduce over shared memory: between two
/// synchronisations it reads this range of every rank's buffer, reduces it in the order of
/// [`canonical_terms`](super::canonical_terms) and writes the result into every rank's buffer.
///
/// The ranges of all ranks follow each other and cover `0..len`; their inner borders are multiples of
/// `granule` elements, so that no two ranks write the same cache line.
///
/// # Panics
/// If `rank` is not below `world_size`, or `granule` is 0.
pub fn owned_range(rank: Rank, world_size: usize, len: usize, granule: usize) -> Range<usize> {
    assert_member(rank, world_size);
    let num_granules = len.div_ceil(granule);
    let border = |index: usize| {
        let (share, rest) = (num_granules / world_size, num_granules % world_size);
        ((share * index + rest.min(index)) * granule).min(len)
    };
    border(rank.0)..border(rank.0 + 1)
}
