use super::{Incoming, Outgoing, Span, Step, assert_member};
use std::ops::Range;
use trireme_base::Rank;

/// Broadcast of `len` elements from `root` along a binomial tree.
///
/// Appends the steps of `rank` to `steps`.
///
/// # Panics
/// If `rank` or `root` is not below `world_size`.
pub fn broadcast_binomial(rank: Rank, world_size: usize, root: Rank, len: usize, steps: &mut Vec<Step>) {
    assert_member(rank, world_size);
    assert_member(root, world_size);
    let absolute = |relative: usize| (relative + root.0) % world_size;
    let relative = (rank.0 + world_size - root.0) % world_size;

    let mut distance = 1;
    while distance < world_size && relative & distance == 0 {
        distance *= 2;
    }
    if relative != 0 {
        steps.push(Step::receive(Incoming::copy(absolute(relative - distance), Span::vector(0..len))));
    }
    while distance > 1 {
        distance /= 2;
        if relative + distance < world_size {
            steps.push(Step::send(Outgoing::new(absolute(relative + distance), Span::vector(0..len))));
        }
    }
}

/// All-gather of blocks of any lengths: at step `k` a rank sends its block to the rank `k` after it and
/// receives from the rank `k` before it. `blocks[r]` is where the block of rank `r` lies in everyone's
/// buffer.
///
/// Appends the steps of `rank` to `steps`.
///
/// # Panics
/// If `rank` has no block.
pub fn all_gather_pairwise(rank: Rank, blocks: &[Range<usize>], steps: &mut Vec<Step>) {
    let world_size = blocks.len();
    assert_member(rank, world_size);
    for distance in 1..world_size {
        let to = (rank.0 + distance) % world_size;
        let from = (rank.0 + world_size - distance) % world_size;
        steps.push(Step::both(
            Outgoing::new(to, Span::vector(blocks[rank.0].clone())),
            Incoming::copy(from, Span::vector(blocks[from].clone())),
        ));
    }
}

/// Barrier by dissemination (Hensgen, Finkel, Manber: "Two algorithms for barrier synchronization", 1988):
/// after `ceil(log2 N)` empty messages each rank has heard, directly or not, from all.
///
/// Appends the steps of `rank` to `steps`.
///
/// # Panics
/// If `rank` is not below `world_size`.
pub fn barrier_dissemination(rank: Rank, world_size: usize, steps: &mut Vec<Step>) {
    assert_member(rank, world_size);
    let mut distance = 1;
    while distance < world_size {
        let to = (rank.0 + distance) % world_size;
        let from = (rank.0 + world_size - distance) % world_size;
        steps.push(Step::both(
            Outgoing::new(to, Span::vector(0..0)),
            Incoming::copy(from, Span::vector(0..0)),
        ));
        distance *= 2;
    }
}
