use super::blocks::Blocks;
use super::{Incoming, Outgoing, Span, Step, assert_member};
use std::ops::Range;
use trireme_base::Rank;

/// All-gather of blocks of any lengths: at step `k` a rank sends its block to the rank `k` after it and
/// receives from the rank `k` before it. `blocks[r]` is where the block of rank `r` lies in everyone's
/// buffer.
///
/// Appends the steps of `rank` to `steps`.
///
/// # Panics
/// If `rank` has no block.
pub fn all_gather_pairwise(rank: Rank, blocks: &[Range<usize>], steps: &mut Vec<Step>) {
    assert_member(rank, blocks.len());
    pairwise(rank, blocks.len(), |rank| blocks[rank].clone(), steps);
}

/// [`all_gather_pairwise`] with blocks by a function.
pub(super) fn pairwise(
    rank: Rank,
    world_size: usize,
    block: impl Fn(usize) -> Range<usize>,
    steps: &mut Vec<Step>,
) {
    for distance in 1..world_size {
        let to = (rank.0 + distance) % world_size;
        let from = (rank.0 + world_size - distance) % world_size;
        steps.push(Step::both(
            Outgoing::new(to, Span::vector(block(rank.0))),
            Incoming::copy(from, Span::vector(block(from))),
        ));
    }
}

/// All-gather among a power of two of ranks: partners at doubling distances exchange all they have (Thakur,
/// Rabenseifner, Gropp, 2005). The blocks must touch.
pub(super) fn recursive_doubling(rank: Rank, world_size: usize, blocks: &Blocks, steps: &mut Vec<Step>) {
    let mut distance = 1;
    while distance < world_size {
        let known_by = |rank: usize| {
            let first = rank & !(distance - 1);
            Span::vector(blocks.of_all(first..first + distance))
        };
        let partner = rank.0 ^ distance;
        steps.push(Step::both(
            Outgoing::new(partner, known_by(rank.0)),
            Incoming::copy(partner, known_by(partner)),
        ));
        distance *= 2;
    }
}

/// All-gather in `ceil(log2 N)` messages for any number of ranks (Bruck et al., 1997): in scratch, blocks lie in the
/// order of the ring from the own one on, so what a rank knows is always one range.
pub(super) fn bruck(rank: Rank, world_size: usize, blocks: &Blocks, steps: &mut Vec<Step>) {
    if world_size == 1 {
        return;
    }
    let after = |distance: usize| (rank.0 + distance) % world_size;
    let place = |blocks_of: Range<usize>| {
        let len_of =
            |distances: Range<usize>| distances.map(|distance| blocks.of(after(distance)).len()).sum();
        let start: usize = len_of(0..blocks_of.start);
        let len: usize = len_of(blocks_of);
        Span::scratch(start..start + len)
    };
    // What leaves lies in the order of this rank's ring, and what arrives continues it.
    steps.push(Step::Copy { from: Span::vector(blocks.of(rank.0)), to: place(0..1) });
    let mut num_known = 1;
    while num_known < world_size {
        let count = num_known.min(world_size - num_known);
        steps.push(Step::both(
            Outgoing::new(after(world_size - num_known), place(0..count)),
            Incoming::copy(after(num_known), place(num_known..num_known + count)),
        ));
        num_known += count;
    }
    for distance in 1..world_size {
        steps.push(Step::Copy {
            from: place(distance..distance + 1),
            to: Span::vector(blocks.of(after(distance))),
        });
    }
}
