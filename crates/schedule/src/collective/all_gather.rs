use super::hosts::assert_member;
use super::own::{Own, distances};
use super::{Incoming, Outgoing, Span, Step};
use std::ops::Range;
use trireme_base::Rank;

/// All-gather of blocks of any lengths: at step `k` a rank sends its block to the rank `k` after it and receives from the rank `k`
/// before it. `blocks[r]` is where the block of rank `r` lies in every buffer.
///
/// Appends the steps of `rank` to `steps`.
///
/// # Panics
/// If `rank` has no block.
pub fn all_gather_pairwise(rank: Rank, blocks: &[Range<usize>], steps: &mut Vec<Step>) {
    assert_member(rank, blocks.len());
    exchange_all(rank.0, blocks.len(), |rank| blocks[rank].clone(), steps);
}

/// [`all_gather_pairwise`] of the blocks of a vector.
pub(super) fn pairwise(own: &Own, steps: &mut Vec<Step>) {
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

/// All-gather among a power of two of ranks (Thakur, Rabenseifner, Gropp, 2005). The blocks must touch.
pub(super) fn recursive_doubling(own: &Own, steps: &mut Vec<Step>) {
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

/// All-gather in `ceil(log2 N)` messages for any number of ranks (Bruck et al., 1997): in scratch, blocks lie in the
/// order of the ring from the own one on, so what a rank knows is always one range.
pub(super) fn bruck(own: &Own, steps: &mut Vec<Step>) {
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
    // What leaves lies in the order of this rank's ring, and what arrives continues it.
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
