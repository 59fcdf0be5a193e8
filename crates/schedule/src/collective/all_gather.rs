use super::hosts::assert_member;
use super::rank_context::{RankContext, distances};
use super::{Incoming, Outgoing, Span, Step};
use std::ops::Range;
use trireme_base::Rank;

/// Appends the steps of `rank` in an all-gather of blocks of any lengths by pairwise exchange. In step `k`, a rank sends its block to the
/// rank `k` after it and receives from the rank `k` before it. `blocks[r]` is the range of elements of rank `r`'s block in every buffer.
///
/// Costs `N - 1` exchanges for `N` ranks.
///
/// # Panics
/// If `rank` is not below `blocks.len()`.
pub fn all_gather_pairwise(rank: Rank, blocks: &[Range<usize>], steps: &mut Vec<Step>) {
    assert_member(rank, blocks.len());
    exchange_all(rank.0, blocks.len(), |rank| blocks[rank].clone(), steps);
}

/// Appends the steps of [`all_gather_pairwise`] for the blocks of a vector.
pub(super) fn pairwise(own: &RankContext, steps: &mut Vec<Step>) {
    exchange_all(own.rank, own.world_size(), |rank| own.blocks.of(rank), steps);
}

fn exchange_all(
    rank: usize,
    world_size: usize,
    block: impl Fn(usize) -> Range<usize>,
    steps: &mut Vec<Step>,
) {
    for distance in 1..world_size {
        let (to, from) = ((rank + distance) % world_size, (rank + world_size - distance) % world_size);
        steps.push(Step::both(Outgoing::new(to, block(rank)), Incoming::copy(from, block(from))));
    }
}

/// Appends the steps of an all-gather by recursive doubling (Thakur, Rabenseifner, Gropp, 2005). Requires a power of two of ranks and
/// contiguous blocks.
pub(super) fn recursive_doubling(own: &RankContext, steps: &mut Vec<Step>) {
    for distance in distances(own.world_size()) {
        let known_by = |rank: usize| {
            let first = rank & !(distance - 1);
            own.blocks.of_all(first..first + distance)
        };
        let partner = own.rank ^ distance;
        let receive = Incoming::copy(partner, known_by(partner));
        steps.push(Step::both(Outgoing::new(partner, known_by(own.rank)), receive));
    }
}

/// Appends the steps of an all-gather in `ceil(log2 N)` messages for any number of ranks (Bruck et al., 1997). Scratch holds the blocks in
/// ring order from the rank's own block on, so the blocks that a rank knows are always one range.
pub(super) fn bruck(own: &RankContext, steps: &mut Vec<Step>) {
    let world_size = own.world_size();
    if world_size == 1 {
        return;
    }
    let block = |distance: usize| own.blocks.of(own.after(distance));
    let place = |distances: Range<usize>| {
        let len_of = |distances: Range<usize>| distances.map(|distance| block(distance).len()).sum();
        let start: usize = len_of(0..distances.start);
        let len: usize = len_of(distances);
        Span::scratch(start..start + len)
    };
    // The blocks to send are the first ones in this rank's ring order, and the received blocks follow the known ones.
    steps.push(Step::Copy { from: block(0).into(), to: place(0..1) });
    for num_known in distances(world_size) {
        let count = num_known.min(world_size - num_known);
        steps.push(Step::both(
            Outgoing::new(own.before(num_known), place(0..count)),
            Incoming::copy(own.after(num_known), place(num_known..num_known + count)),
        ));
    }
    let placed = |distance| Step::Copy { from: place(distance..distance + 1), to: block(distance).into() };
    steps.extend((1..world_size).map(placed));
}
